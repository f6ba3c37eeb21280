"""A report in every form: for a terminal, as JSON, HTML, JUnit, and as the tables of the documentation.

What attackers' programs made the host see is quoted, so it is escaped in each form.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

from fumehood.attacks.model import Attack, Finding, Verdict
from fumehood.attacks.prelude import PRELUDE
from fumehood.attacks.suite import CONTROL, Report

_TITLE_COLUMNS = 56


def _columns(report: Report) -> tuple[str, ...]:
    return (CONTROL, *(t for t in report.tiers if t not in report.skipped))


def cell(finding: Finding | None) -> str:
    """One cell in a word."""
    if finding is None:
        return "-"
    word = finding.verdict.value
    if finding.verdict is Verdict.BROKEN and finding.best_effort:
        word = "best effort"
    return word + ("+residue" if finding.residue else "")


def text_matrix(report: Report) -> str:
    """Attacks down, tiers across, then one line for each tier."""
    columns = _columns(report)
    lines = ["  ".join([f"{'':<6}{'':<{_TITLE_COLUMNS}}", *(f"{c:<17}" for c in columns)]).rstrip()]
    for attack in report.attacks:
        row = [f"{attack.id:<6}{attack.title[: _TITLE_COLUMNS - 1]:<{_TITLE_COLUMNS}}"]
        for tier in columns:
            finding = report.findings.get((attack.id, tier))
            seconds = f"{finding.seconds:5.1f} s" if finding else ""
            mark = "!" if finding and tier != CONTROL and finding.failed else " "
            row.append(f"{cell(finding):<12}{mark}{seconds}"[:19].ljust(19))
        lines.append(" ".join(row).rstrip())
    return "\n".join([*lines, "", *summary(report)])


def summary(report: Report) -> list[str]:
    """One line for each tier, then what went wrong."""
    lines = []
    faulty = report.faulty()
    lines.append(
        f"{CONTROL} (the control): {report.count(CONTROL, Verdict.BROKEN)} attacks succeed where nothing stops them, "
        f"{len(faulty)} faulty{': ' + ', '.join(faulty) if faulty else ''}; {report.seconds.get(CONTROL, 0):.0f} s"
    )
    for tier in report.tiers:
        if tier in report.skipped:
            lines.append(f"{tier}: not on this host: {report.skipped[tier]}")
            continue
        held, broken = report.count(tier, Verdict.HELD), report.count(tier, Verdict.BROKEN)
        unclear = report.count(tier, Verdict.INCONCLUSIVE)
        left = sum(1 for a in report.attacks if (f := report.findings.get((a.id, tier))) and f.residue)
        lines.append(
            f"{tier}: {held} held of {held + broken + unclear} applicable, {broken} broken, {unclear} inconclusive, "
            f"residue after {left}; {report.seconds.get(tier, 0):.0f} s"
        )
        lines += [f"  left behind: {item}" for item in report.residue.get(tier, ())]
        for attack in report.attacks:
            finding = report.findings.get((attack.id, tier))
            if finding is not None and finding.failed:
                lines.append(f"  {attack.id} {attack.title}: {cell(finding)}: {finding.seen}")
                lines += [f"    left behind: {item}" for item in finding.residue]
    return lines


def to_dict(report: Report) -> dict[str, Any]:
    """The whole report as plain values."""
    return {
        "facts": report.facts,
        "tiers": {t: _tier_dict(report, t) for t in _columns(report)} | {
            t: {"skipped": why} for t, why in report.skipped.items()
        },
        "attacks": [attack_dict(a) for a in report.attacks],
        "findings": [f.to_dict() for f in report.findings.values()],
        "faulty": report.faulty(),
        "residue": report.residue,
        "failed": report.failed(),
    }  # fmt: skip


def _tier_dict(report: Report, tier: str) -> dict[str, Any]:
    counts = {v.value: report.count(tier, v) for v in Verdict}
    return {**counts, "seconds": round(report.seconds.get(tier, 0.0), 1)}


def attack_dict(attack: Attack) -> dict[str, Any]:
    """What an attack is, without its program."""
    return {
        "id": attack.id,
        "group": attack.group,
        "title": attack.title,
        "source": attack.source,
        "sees": attack.watch.sees,
        "holds_from": attack.required_of,
        "proves": list(attack.proves),
        "needs": list(attack.needs),
    }


def small_dict(report: Report) -> dict[str, Any]:
    """The matrix alone, small enough to keep beside the documentation: verdicts without evidence and times."""
    columns = _columns(report)
    return {
        "facts": {k: report.facts[k] for k in ("fumehood", "kernel", "python", "user") if k in report.facts},
        "tiers": list(columns),
        "attacks": [
            {
                "id": a.id,
                "group": a.group,
                "title": a.title,
                "verdicts": [cell(report.findings.get((a.id, tier))) for tier in columns],
            }
            for a in report.attacks
        ],
    }


def markdown_matrix(small: Mapping[str, Any], *, first: int = 6) -> str:
    """The README's matrix from :func:`small_dict`: the first rows in full, then each group as held of applicable."""
    tiers = small["tiers"]
    lines = ["| attack | " + " | ".join(f"`{t}`" for t in tiers) + " |", "|---|" + "---|" * len(tiers)]
    for row in small["attacks"][:first]:
        lines.append(f"| {row['title']} | " + " | ".join(row["verdicts"]) + " |")
    groups = list(dict.fromkeys(row["group"] for row in small["attacks"]))
    for group in groups:
        rows = [row for row in small["attacks"] if row["group"] == group]
        lines.append(
            f"| all of {group} ({len(rows)}) | " + " | ".join(_share(rows, i) for i in range(len(tiers))) + " |"
        )
    everything = small["attacks"]
    lines.append(
        f"| **all {len(everything)}** | " + " | ".join(f"**{_share(everything, i)}**" for i in range(len(tiers))) + " |"
    )
    return "\n".join(lines)


def _share(rows: list[Mapping[str, Any]], column: int) -> str:
    words = [row["verdicts"][column] for row in rows]
    applicable = [w for w in words if w not in ("n/a", "-")]
    return f"{sum(w == 'held' for w in applicable)} of {len(applicable)} held"


def markdown_catalogue(attacks: tuple[Attack, ...]) -> str:
    """The table of docs/attacks.md."""
    lines = [
        "| id | attack | where it comes from | what the host watches | must be held from |",
        "|---|---|---|---|---|",
    ]
    for attack in attacks:
        lines.append(f"| {attack.id} | {attack.title} | {attack.source} | {attack.watch.sees} | {attack.required_of} |")
    return "\n".join(lines).replace("\\", "\\\\")


def junit(report: Report) -> str:
    """JUnit XML: a suite for each tier, a case for each attack."""
    root = ElementTree.Element("testsuites", name="fumehood verify")
    for tier in _columns(report):
        suite = ElementTree.SubElement(root, "testsuite", name=tier)
        failures = skipped = 0
        for attack in report.attacks:
            finding = report.findings.get((attack.id, tier))
            if finding is None:
                continue
            case = ElementTree.SubElement(
                suite, "testcase", classname=f"{tier}.{attack.group}", name=f"{attack.id} {attack.title}",
                time=f"{finding.seconds:.3f}",
            )  # fmt: skip
            failed = finding.failed if tier != CONTROL else attack.id in report.faulty()
            if failed:
                failures += 1
                ElementTree.SubElement(case, "failure", message=_xml(f"{cell(finding)}: {finding.seen}"))
            elif finding.verdict is Verdict.NOT_APPLICABLE or (finding.verdict is Verdict.BROKEN and tier != CONTROL):
                skipped += 1
                ElementTree.SubElement(case, "skipped", message=_xml(f"{cell(finding)}: {finding.seen}"))
        suite.set("tests", str(len(suite)))
        suite.set("failures", str(failures))
        suite.set("skipped", str(skipped))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _xml(text: str) -> str:
    """Text with what XML cannot hold at all replaced."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 76em; padding: 0 1em; color: #1d1d1f; }
table { border-collapse: collapse; width: 100%; margin: 1em 0; } th, td { text-align: left; padding: .3em .6em;
border-bottom: 1px solid #ddd; vertical-align: top; } pre { background: #f5f5f4; padding: .8em; overflow-x: auto; }
.held { color: #14632f; } .broken, .inconclusive { color: #a11; font-weight: 600; } .na { color: #666; }
.allowed { color: #8a5a00; } details { margin: .2em 0; } summary { cursor: pointer; } code { font-size: .93em; }
@media (prefers-color-scheme: dark) { body { background: #161618; color: #e8e8ea; } pre { background: #232326; }
th, td { border-color: #3a3a3d; } .held { color: #6fce8f; } .broken, .inconclusive { color: #ff8080; }
.na { color: #999; } .allowed { color: #e0b060; } }
"""


def to_html(report: Report) -> str:
    """One self-contained page: the verdict, the matrix with the evidence, each program, receipts, and the host."""
    e = html.escape
    columns = _columns(report)
    body = [f"<h1>fumehood verify</h1><p>{e(report.facts.get('date', ''))}. An attack counts only if it succeeds on "
            f"<code>{CONTROL}</code>, where nothing is enforced. The host is the witness of every verdict; nothing is "
            "taken on the attacker's word.</p>",
            "<h2>In short</h2><ul>", *(f"<li>{e(line.strip())}</li>" for line in summary(report)), "</ul>"]  # fmt: skip
    body += ["<h2>Matrix</h2><table><tr><th>attack</th>", *(f"<th>{e(c)}</th>" for c in columns), "</tr>"]
    for attack in report.attacks:
        body.append(f"<tr><td>{_attack_html(attack)}</td>")
        body += [_cell_html(report.findings.get((attack.id, tier)), tier) for tier in columns]
        body.append("</tr>")
    body += ["</table>", "<h2>Receipts</h2>"]
    for tier in columns[1:]:
        receipt = next((f.receipt for (_, t), f in report.findings.items() if t == tier and f.receipt), None)
        if receipt is not None:
            body.append(f"<h3>{e(tier)}</h3>{_receipt_html(receipt)}")
    body += ["<h2>Host</h2><table>",
             *(f"<tr><th>{e(k)}</th><td>{e(v)}</td></tr>" for k, v in report.facts.items()), "</table>",
             "<h2>What stands in front of every program</h2>", f"<pre>{e(PRELUDE)}</pre>"]  # fmt: skip
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width"><meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        f"style-src 'unsafe-inline'\"><title>fumehood verify</title><style>{_STYLE}</style></head><body>"
        + "".join(body)
        + "</body></html>\n"
    )


def _attack_html(attack: Attack) -> str:
    e = html.escape
    second = f"<p>Second program, {e(attack.second_when)} the first:</p><pre>{e(attack.second.strip())}</pre>"
    return (
        f"<details><summary>{e(attack.id)} {e(attack.title)}</summary><p>Source: {e(attack.source)}. "
        f"The host watches {e(attack.watch.sees)}. Must be held from <code>{e(attack.required_of)}</code>.</p>"
        f"<pre>{e(attack.program.strip())}</pre>{second if attack.second else ''}</details>"
    )


def _cell_html(finding: Finding | None, tier: str) -> str:
    if finding is None:
        return "<td>-</td>"
    style = {"n/a": "na"}.get(finding.verdict.value, finding.verdict.value)
    if tier == CONTROL:
        style = "na" if finding.verdict in (Verdict.BROKEN, Verdict.NOT_APPLICABLE) else "broken"
    elif finding.verdict is Verdict.BROKEN and not finding.failed:
        style = "allowed"
    seen = html.escape(finding.seen + "".join(f"; left behind: {item}" for item in finding.residue))
    return (
        f'<td><details><summary class="{style}">{html.escape(cell(finding))}</summary>{seen}; '
        f"{finding.seconds:.1f} s</details></td>"
    )


def _receipt_html(receipt: Mapping[str, Any]) -> str:
    e = html.escape
    rows = [
        f"<tr><td>{e(c['name'])}</td><td>{e(c['held'])}</td><td>{e(c['mechanism'])}</td><td>{e(str(c['value']))}</td></tr>"
        for c in receipt["controls"]
    ]
    return (
        f"<p>Boundary <code>{e(receipt['boundary'])}</code>, enforced by {e(receipt['host'] or 'the tier')}.</p>"
        f"<table><tr><th>control</th><th>held</th><th>mechanism</th><th>read back</th></tr>{''.join(rows)}</table>"
    )


def to_json(report: Report) -> str:
    """:func:`to_dict` as text."""
    return json.dumps(to_dict(report), indent=1) + "\n"
