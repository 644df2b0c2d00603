"""A small matrix and label sets of every verdict, for the tests of the verifier's public face."""

import numpy as np

N, D = 30, 4
W = np.random.default_rng(0).standard_normal((N, D))
SETS = [np.sort(np.random.default_rng(i).choice(N, 2 + i % 3, replace=False)).tolist() for i in range(24)]
SETS += [np.flatnonzero(W @ x > 0).tolist() for x in np.random.default_rng(9).standard_normal((12, D))]
