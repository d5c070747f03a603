"""LightningModules and LightningDataModules as they are: `task=lightning`, `dataset=lightning`."""
