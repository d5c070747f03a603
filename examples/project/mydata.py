"""A dataset of your own: the facts that a model may use, and its splits as arrays."""

import numpy as np

from framework.data.source import Arrays


class Waves:
    """Noisy sums of sines. The input is a point in [-1, 1)^num_features, the target is one number."""

    task = "regression"

    def __init__(self, num_train=512, num_features=4, noise=0.05):
        self.sizes = {"train": num_train, "val": 128, "test": 128}
        self.noise = noise
        self.info = {"num_features": num_features, "num_outputs": 1}

    def problems(self):
        return []  # or lines such as "dataset.root: no such folder (where to get it)"

    def load(self, split):
        random = np.random.RandomState(list(self.sizes).index(split))
        x = random.uniform(-1, 1, (self.sizes[split], self.info["num_features"]))
        y = np.sin(3 * x).sum(axis=1, keepdims=True) + self.noise * random.standard_normal((len(x), 1))
        return Arrays(x.astype(np.float32), y.astype(np.float32))

    def transform(self, inputs, targets, *, keys):
        return inputs, targets  # keys: one random key per sample, for augmentation
