"""The interface between the loop and the strategies, and the code that the strategies share."""
