"""Module trees and tensors (sharded or nested): how to inspect and change them."""
