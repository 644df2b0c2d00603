"""The recipes of docs/frameworks.md and docs/distributed.md run and do what they say, on two processes where ranks have to agree."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import join, leave
from torch import nn

import sigkernels as sk

PAGES = [Path(__file__).resolve().parent.parent / "docs" / name for name in ("frameworks.md", "distributed.md")]
pytestmark = pytest.mark.skipif(not PAGES[0].exists(), reason="needs the source tree")


def run(*sections: str, **have: Any) -> dict[str, Any]:
    """Runs the blocks of these sections one after the other; returns the names that they define."""
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    texts = dict(re.findall(r"^## (.*?)\n(.*?)(?=^#+ |\Z)", text, re.MULTILINE | re.DOTALL))
    for section in ("The model computes the loss", *sections):
        for code in re.findall(r"^```python\n(.*?)^```", texts[section], re.MULTILINE | re.DOTALL):
            exec(compile(code, section, "exec"), have)
    return have


def record_dtypes(module: nn.Module) -> set[torch.dtype]:
    """The dtypes of what the module returns from now on."""
    seen: set[torch.dtype] = set()
    module.register_forward_hook(lambda _, __, output: seen.add(output.dtype))
    return seen


def joint_batch() -> tuple[torch.Tensor, sk.LabelSets]:
    torch.manual_seed(7)
    return torch.randn(8, 300), sk.LabelSets.from_lists([[i, 50 * i, 1999] for i in range(8)], 2000)


def seeded(model: type[nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return model()


def same_on_both_ranks(tensors) -> None:
    for tensor in tensors:
        parts = [torch.empty_like(tensor) for _ in range(2)]
        torch.distributed.all_gather(parts, tensor.contiguous())
        assert torch.equal(*parts)


def _worker(rank: int, folder: Path) -> None:
    join(folder, rank)
    x, sets = joint_batch()
    own = slice(4 * rank, 4 * rank + 4)
    torch.manual_seed(rank)  # each rank has other examples and another start, which DDP makes one

    names = run("DDP")
    same_on_both_ranks([p.detach() for p in names["model"].parameters()])
    ddp = nn.parallel.DistributedDataParallel(seeded(names["Model"]))
    ddp(x[own], sets[own]).backward()
    grads = {"DDP": [p.grad for p in ddp.parameters()]}
    same_on_both_ranks(grads["DDP"])

    ddp = nn.parallel.DistributedDataParallel(sk.DFTHead(300, 2000, k=5, slack=4))  # a head by itself
    ddp(x[own], sets[own]).backward()
    same_on_both_ranks([p.grad for p in ddp.parameters()])

    fully_shard = run("FSDP2", **names)["fully_shard"]
    sharded = seeded(names["Model"])
    fully_shard(sharded.head)
    fully_shard(sharded)
    sharded(x[own], sets[own]).backward()
    grads["FSDP2"] = [p.grad.full_tensor() for p in sharded.parameters()]

    torch.manual_seed(0)  # sharded heads want the same examples on all ranks
    names = run("Sharded heads", "Checkpoints", folder=folder)
    same_on_both_ranks([p.detach() for p in (*names["encoder"].parameters(), *names["head"].proj.parameters())])
    names["DistributedSampler"] = torch.utils.data.distributed.DistributedSampler
    assert run("Data and label parallel", **names)["loss"].isfinite()

    if rank == 0:
        torch.save(grads, folder / "grads.pt")
    leave(folder, rank)


def test_two_processes_get_the_gradients_of_the_joint_batch(tmp_path):
    torch.multiprocessing.spawn(_worker, (tmp_path,), nprocs=2)
    model = seeded(run()["Model"])
    x, sets = joint_batch()
    model(x, sets).backward()
    for framework, grads in torch.load(tmp_path / "grads.pt").items():
        for (name, p), grad in zip(model.named_parameters(), grads, strict=True):
            torch.testing.assert_close(grad, p.grad, rtol=1e-4, atol=1e-6, msg=lambda m: f"{framework} {name}: {m}")  # noqa: B023


def test_accelerate():
    pytest.importorskip("accelerate")
    names = run("accelerate")
    assert names["loss"].isfinite()
    head = names["model"].head
    seen = record_dtypes(head.proj)
    names["model"](*next(iter(names["loader"])))
    assert seen == {torch.bfloat16}


def test_scikit_learn():
    pytest.importorskip("sklearn")
    names = run("scikit-learn")
    assert "web" in names["model"].predict(["a web server"])[0]


def test_torch_func():
    names = run("torch.func")
    names["model"](names["x"], names["y"]).backward()
    for name, p in names["model"].named_parameters():
        torch.testing.assert_close(names["each"][name].mean(0), p.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path):
    pytest.importorskip("pytorch_lightning")
    names = run("Lightning", folder=tmp_path)
    assert names["trainer"].global_step == 4
    seen = record_dtypes(names["module"].model.head.proj)
    names["pl"].Trainer(
        max_steps=1, accelerator="cpu", precision="bf16-mixed", logger=False, enable_checkpointing=False
    ).fit(names["module"], names["loader"])
    assert seen == {torch.bfloat16}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A checkpoint of an encoder without any head."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=100,
        hidden_size=40,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
    )
    folder = tmp_path_factory.mktemp("base")
    transformers.BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def hugging_face(base, tmp_path_factory) -> dict[str, Any]:
    pytest.importorskip("accelerate")  # the Trainer needs it
    return run("Hugging Face", base=base, folder=tmp_path_factory.mktemp("trained"))


def test_trainer(hugging_face):
    trained, loaded = hugging_face["trainer"].model, hugging_face["model"]
    assert trained is not loaded and loaded.config.head == {"k": 10, "slack": 16}
    for (name, p), q in zip(trained.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_trainer_autocast_reaches_the_head(hugging_face):
    trainer = hugging_face["trainer"]
    seen = record_dtypes(trainer.model.head.proj)
    assert trainer.evaluate()["eval_loss"] > 0
    trainer.training_step(trainer.model, hugging_face["collate"](hugging_face["rows"][:4]))
    assert seen == {torch.bfloat16}


def fill_memory() -> None:
    """Leaves NaN in memory that is free, for what forgets to initialise."""
    for size in (640, 32_000, 80_000, 1_480):
        torch.full((size,), torch.nan)


@pytest.mark.parametrize("kind", ["built", "swapped"])
def test_a_base_checkpoint_leaves_the_head_initialised(hugging_face, base, kind):
    from transformers import BertForSequenceClassification

    class Swapped(hugging_face["HeadMixin"], BertForSequenceClassification):
        def __init__(self, config):
            super().__init__(config)
            sk.swap_output_layer(self, "classifier", **config.head)
            self.post_init()

    model = hugging_face["BertForManyLabels"] if kind == "built" else Swapped
    fill_memory()
    loaded = model.from_pretrained(base, config=hugging_face["config"])
    head = loaded.head if kind == "built" else loaded.classifier
    fresh = sk.DFTHead(40, 2000, **hugging_face["config"].head)
    assert torch.equal(head.proj.bias, fresh.proj.bias)  # the prior
    for ours, other in ((head.slack_weight, fresh.slack_weight), (head.proj.weight, fresh.proj.weight)):
        torch.testing.assert_close(ours.std(), other.std(), rtol=0.1, atol=0)
        assert ours.abs().max() <= 1.1 * other.abs().max()


def test_what_the_checkpoint_has_stays(hugging_face, tmp_path):
    from safetensors.torch import load_file, save_file

    model = hugging_face["model"]
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["head.slack_weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    fill_memory()
    loaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(loaded.head.proj.weight, model.head.proj.weight)
    assert torch.equal(loaded.head.proj.bias, model.head.proj.bias)
    assert loaded.head.slack_weight.abs().max() <= 1 / 4  # √slack


def test_a_checkpoint_of_another_k_is_refused(hugging_face, tmp_path):
    """The config carries k and codes, and so do the weights: with a config of another head they are not loaded."""
    from safetensors.torch import load_file, save_file

    model = hugging_face["model"]  # k = 10
    model.save_pretrained(tmp_path)
    other = {"k": 2, "codes": 16, "slack": 16}  # parameters of the same shapes
    with pytest.raises(ValueError, match=r"DFTHead with k = 10, not 2 and codes = 0, not 16; build one like it"):
        type(model).from_pretrained(tmp_path, head=other)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["head._extra_state"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = type(model).from_pretrained(tmp_path)  # of before there was a mark
    assert torch.equal(loaded.head.slack_weight, model.head.slack_weight)


def test_a_class_without_the_mixin_is_refused(hugging_face, base):
    from transformers import BertForSequenceClassification

    class Unaware(BertForSequenceClassification):
        def __init__(self, config):
            super().__init__(config)
            sk.swap_output_layer(self, "classifier", **config.head)

    with pytest.raises(TypeError, match=r"class Unaware\(HeadMixin, …\)"):
        Unaware.from_pretrained(base, config=hugging_face["config"])


def test_a_mixin_that_comes_too_late_is_refused(hugging_face):
    """The model's own _init_weights would be called, and leave the head whatever lay in memory."""
    from transformers import BertForSequenceClassification

    with pytest.raises(TypeError, match=r"of (Bert)?PreTrainedModel.*stands before.*class Late\(HeadMixin, …\)"):
        type("Late", (BertForSequenceClassification, hugging_face["HeadMixin"]), {})


def test_the_config_has_to_describe_the_head(hugging_face, base):
    with pytest.raises(ValueError, match=r"config.head must hold the arguments of the DFTHead.*got None"):
        hugging_face["BertForManyLabels"](hugging_face["BertConfig"].from_pretrained(base))
