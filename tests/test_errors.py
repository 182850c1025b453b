"""What exceptions say reaches people as one plain line."""

import pytest

from rmsnorm_cli.errors import flat
from rmsnorm_cli.gates.gate import classified
from rmsnorm_cli.kernels import Implementation


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("\x1b[91m\x1b[1merror[INTERNAL]:\x1b[0m no\n  IR\x07", "error[INTERNAL]: no IR"),
        ("\x1b]8;;file:///x\x1b\\here\x1b]8;;\x1b\\", "here"),
        ("one\r\ntwo\tthree", "one two three"),
        ("[bold]not markup[/bold]", "[bold]not markup[/bold]"),
        (RuntimeError("plain"), "plain"),
        ("", ""),
    ],
)
def test_what_others_say_is_one_line_without_a_terminals_codes(said, line):
    assert flat(said) == line


def test_the_coloured_message_of_another_projects_compiler_is_recorded_without_colours():
    other = Implementation("other", lambda x, gamma, eps: x)
    problem = classified(other, RuntimeError("\x1b[91merror:\x1b[0m cp_size\n only supports 32"))
    assert (problem.status, problem.text) == ("refused", "RuntimeError: error: cp_size only supports 32")
