"""Tests: the project trains, and two processes compute the same as one process."""

from framework import load, run


def test_it_learns(tmp_path):
    done = run("experiment=first", f"run.root={tmp_path}")
    assert done.metrics["test"]["last"]["loss"] < 0.5 * done.rows[0]["loss"]
    assert load(done.directory).head.out_features == 1


def test_two_processes_compute_what_one_does(tmp_path):
    line = ["experiment=first", "trainer.max_epochs=2", "precision=fp64", f"run.root={tmp_path}"]
    one, two = run(*line), run(*line, "parallel=ddp", "launch.nproc_per_node=2")
    assert abs(one.metrics["test"]["last"]["loss"] - two.metrics["test"]["last"]["loss"]) < 1e-10
