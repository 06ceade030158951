"""docs/troubleshooting.md names only metrics and settings that there are."""

import re

from grpo.configs.keys import known_keys
from grpo.configs.run import RunSettings
from grpo.orchestrator.monitoring.metrics import check_name

from tests.pages import Page

NAMED = set(re.findall(r"`([^`\s]+)`", Page("docs/troubleshooting.md").text))
GROUPS = ("reward/", "rollout/", "policy/", "optim/", "time/", "eval/")
ELSEWHERE = {
    "metrics.jsonl",
    "base_mismatch",
    "canary_mismatch",
    "not_applied",
    "max_num_batched_tokens",
    "max_num_seqs",
}
"""A file, reasons of refusals, arguments of vLLM's."""


def test_every_metric_that_the_page_names_can_be_in_a_line() -> None:
    metrics = {name for name in NAMED if name.startswith(GROUPS)}
    assert len(metrics) > 10
    for metric in metrics:
        check_name(metric)


def test_every_setting_that_the_page_names_is_a_key_of_a_run() -> None:
    keys = {name.replace("[]", "") for name in NAMED if re.fullmatch(r"[a-z_]+(\[\])?(\.[a-z_]+)*", name)} - ELSEWHERE
    assert len(keys) > 25
    assert keys - set(known_keys(RunSettings)) == set()
