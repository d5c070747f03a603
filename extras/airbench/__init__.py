"""airbench94, CIFAR-10 in eight epochs: a recipe with its own model, data, optimizer and parts of the loop.

Source: Jordan 2024, "94% on CIFAR-10 in 3.29 seconds on a single GPU" (arXiv 2404.00498), called "the paper" in this folder;
and its variant with Muon, airbench94_muon of github.com/KellerJordan/cifar10-airbench (Jordan et al. 2024, "Muon: an optimizer
for hidden layers").
"""
