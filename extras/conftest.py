"""What the tests of the extras share with those of the framework. The command `pytest` collects both."""

from tests.conftest import no_command_outlives_its_test

__all__ = ["no_command_outlives_its_test"]
