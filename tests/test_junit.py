"""junit.xml as a CI reads it."""

from xml.etree import ElementTree as ET

from rmsnorm_cli.junit import junit
from rmsnorm_cli.results import CaseResult


def result(status, scope="dx", detail="", hint=""):
    return CaseResult("mine", "cpu", scope, "exact class", "float32", "3x257", status, None, detail, hint)


def test_every_case_is_there_by_name_and_the_totals_add_up():
    statuses = ("passed", "failed", "error", "inconclusive", "skipped", "refused")
    root = ET.fromstring(junit([*map(result, statuses), result("passed", "forward")], "verify"))
    dx, forward = root.findall("testsuite")
    assert dx.attrib == {"name": "mine.dx", "tests": "6", "failures": "1", "errors": "2", "skipped": "2"}
    assert forward.get("tests") == "1"
    assert [case.get("name") for case in dx] == ["3x257 float32"] * 6


def test_a_failure_carries_what_was_seen_and_what_it_points_to():
    root = ET.fromstring(junit([result("failed", detail="got 1", hint="the mask")], "verify"))
    failure = root.find("testsuite/testcase/failure")
    assert failure is not None
    assert failure.get("message") == "failed: got 1"
    assert failure.text == "the mask"


def test_characters_that_xml_cannot_carry_do_not_break_the_file():
    root = ET.fromstring(junit([result("error", detail="a\x00b\x1b[31m \ud800 <&>")], "verify"))
    error = root.find("testsuite/testcase/error")
    assert error is not None
    assert "<&>" in str(error.get("message"))
