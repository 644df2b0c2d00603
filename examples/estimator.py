"""No training loop: fit and score on the data that ships with the package, in the manner of scikit-learn.

python examples/estimator.py --examples 20000
"""

from __future__ import annotations

import argparse

import sigkernels as sk
from sigkernels import datasets


def main(argv: list[str] | None = None) -> float:
    """Returns the micro F1 on held-out packages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=512)
    args = parser.parse_args(argv)

    data = datasets.debian_deps()
    _, part = data.split(test=args.examples)
    train, test = part.split(test=args.examples // 10)

    model = sk.MultiLabelClassifier(epochs=args.epochs, hidden=args.hidden, threshold=0.3, verbose=True)
    model.fit(train.features.to_scipy(), train.labels.to_scipy())
    score = model.score(test.features.to_scipy(), test.labels.to_scipy())
    print(f"{model.head_}\nmicro F1 on {len(test)} held-out packages: {score:.3f}")

    probabilities, labels = model.topk(test.features[:1].to_scipy(), 5)
    guesses = ", ".join(f"{test.label_names[i]} ({p:.2f})" for i, p in zip(labels[0], probabilities[0], strict=True))
    truth = ", ".join(test.label_names[test.labels[0].numpy()])
    print(f"{test.names[0]} depends on {truth}\n  predicted: {guesses}")
    return score


if __name__ == "__main__":
    main()
