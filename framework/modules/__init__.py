"""Module trees and (sharded, nested) tensors: what they show, and how they are changed."""
