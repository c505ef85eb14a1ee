"""Starts the commands; a missing package ends in one sentence."""

import importlib

from multimax_fairseq import compat
from multimax_fairseq.compat.program import program


def average() -> None:
    start("average")


def compare() -> None:
    start("compare")


def evaluate() -> None:
    start("evaluate")


def start(name: str) -> None:
    with program(f"multimax-{name}"):
        compat.apply()
        importlib.import_module(f"multimax_fairseq.commands.{name}").main()
