"""junit.xml from verdicts, so that any CI shows each case by name."""

import re
from collections.abc import Iterable
from xml.etree import ElementTree as ET

from rmsnorm_cli.results import CaseResult

# XML 1.0 cannot carry these even escaped; a foreign kernel's message may hold them
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(results: Iterable[CaseResult], command: str) -> bytes:
    """Return one `testsuite` per implementation and scope; failed is a failure, error and inconclusive are errors."""
    root = ET.Element("testsuites", name=f"rmsnorm {command}")
    suites: dict[str, ET.Element] = {}
    totals: dict[str, dict[str, int]] = {}
    for result in results:
        name = f"{result.impl}.{result.scope}"
        suite = suites.get(name)
        if suite is None:
            suite = suites[name] = ET.SubElement(root, "testsuite", name=_clean(name))
            totals[name] = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
        case = ET.SubElement(
            suite, "testcase", classname=_clean(f"{name}.{result.gate}"), name=_clean(f"{result.case} {result.dtype}")
        )
        totals[name]["tests"] += 1
        element, total = {
            "failed": ("failure", "failures"),
            "error": ("error", "errors"),
            "inconclusive": ("error", "errors"),
            "skipped": ("skipped", "skipped"),
            "refused": ("skipped", "skipped"),
        }.get(result.status, ("", ""))
        if element:
            totals[name][total] += 1
            child = ET.SubElement(case, element, message=_clean(f"{result.status}: {result.detail}"))
            child.text = _clean(result.hint)
    for name, suite in suites.items():
        for key, value in totals[name].items():
            suite.set(key, str(value))
    ET.indent(root)
    return bytes(ET.tostring(root, encoding="utf-8", xml_declaration=True))


def _clean(text: str) -> str:
    return _UNPRINTABLE.sub("�", text)
