"""docs/channels.md: its tables have the metrics that the code emits, and its examples are settings."""

import asyncio
import inspect
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import yaml

from configs.channels import ApiSettings, HintSource
from configs.common import load
from configs.cross import joined_check
from configs.orch import OrchSettings
from configs.train import TrainSettings
from orchestrator.advantage import GroupCredit
from orchestrator.channels import Channels
from orchestrator.disagreement import pairs, teachers, verdicts
from orchestrator.disagreement.actions import agreement_of
from orchestrator.disagreement.asked import AskedJudge
from orchestrator.disagreement.asking import Asker
from orchestrator.disagreement.budget import Budget, Price
from orchestrator.disagreement.channel import DisagreementChannel
from orchestrator.disagreement.choosing import Chooser
from orchestrator.disagreement.opening import open_hint_model
from orchestrator.disagreement.ready import ReadyPairs
from orchestrator.disagreement.turns import Tools
from orchestrator.episodes.records import EpisodeResult
from orchestrator.episodes.templates import ChatTemplate
from orchestrator.hints import hinting, sources
from orchestrator.hints import pairs as hint_pairs
from orchestrator.hints.hinting import Hinter
from orchestrator.hints.sources import FromEnvironment, FromModel, FromSiblings, FromTemplates
from orchestrator.hints.templates import HintTemplates
from orchestrator.hints.writing import HintWriter
from orchestrator.monitors.metrics import GROUPS, dropped_metrics
from orchestrator.samples import finish_group
from orchestrator.teachers.rows import TeacherCounts
from orchestrator.teachers.scoring import FailureReason, Scored, TeacherFailure
from tests.orchestrator.disagreement.teachers import drained, slow, status, teachers_serving
from tests.orchestrator.disagreement.test_channel import TEMPLATE, Reference, result
from tests.orchestrator.hints.played import TINY, Answer, played, wrong
from transport.records import Int32

PAGE = (Path(__file__).parents[1] / "docs" / "channels.md").read_text()
TABLES = re.findall(r"^\| metric \| meaning \|\n\|---\|---\|\n((?:\|.*\n)+)", PAGE, flags=re.M)


# --- metrics ---


def rows_of(table: str) -> dict[str, str]:
    """Meaning by name."""
    rows = [row.strip("|").split(" | ") for row in table.splitlines()]
    names = [(name, meaning) for first, meaning in rows for name in re.findall(r"`([^`]+)`", first)]
    assert len(names) == len(dict(names)), "a metric stands twice"
    return dict(names)


TEACHER, HINTS, PAIRS = map(rows_of, TABLES)


def listed(meaning: str) -> set[str]:
    """The words that a row lists, without what is said of them in brackets."""
    return set(re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", meaning)))


def reasons_in(*modules: ModuleType) -> set[str]:
    """The words for metrics that modules define."""
    found = (re.findall(r'^[A-Z_, ]+ = ("[a-z_", ]+")$', inspect.getsource(one), flags=re.M) for one in modules)
    return {word for lines in found for line in lines for word in re.findall(r"\w+", line)}


def documented(rows: Mapping[str, str], **words: set[str]) -> set[str]:
    """The names of a table with each of `words` in its place: REASON, SOURCE."""
    names = set(rows)
    for place, values in words.items():
        names |= {name.replace(place, value) for name in names if place in name for value in values}
        names = {name for name in names if place not in name}
    return names


def test_there_is_a_table_for_each_channel() -> None:
    assert [{name.partition("/")[0] for name in rows} for rows in (TEACHER, HINTS, PAIRS)] == [
        {"teacher", "rollout"},
        {"hints"},
        {"pairs"},
    ]
    assert {"teacher", "hints", "pairs"} <= set(GROUPS)


class Failing:
    """A teacher who fails for a reason."""

    name = "failing"

    def __init__(self) -> None:
        self.counts = TeacherCounts()
        self.reason: FailureReason = "down"

    async def score(self, rows: Sequence[Int32], temperatures: Sequence[float], *, adapter: int = 0) -> list[Scored]:
        self.counts.failed[self.reason] += len(rows)
        return [TeacherFailure(reason=self.reason, message="it fails") for _ in rows]

    def metrics(self) -> dict[str, float]:
        return self.counts.metrics()

    async def close(self) -> None: ...


async def test_the_teachers_table_has_what_is_counted_and_why_rollouts_are_dropped() -> None:
    reasons: set[Any] = set(get_args(FailureReason))
    assert listed(TEACHER["teacher/failed_REASON"]) == reasons
    teacher, dropped = Failing(), Counter[str]()
    channels = Channels(teacher=teacher)
    group = finish_group([played("a", [Answer(text="x")])], GroupCredit(), [], group="g")
    for teacher.reason in sorted(reasons):
        dropped.update((await channels.taught(group)).withheld.values())
    emitted = channels.metrics().keys() | dropped_metrics(dropped, Counter()).keys()
    assert documented(TEACHER, REASON=reasons) == emitted - {"rollout/dropped"}


def errors() -> Iterator[list[EpisodeResult]]:
    """Groups with errors that come to every end but those of the model's."""
    yield [played("a", [wrong("x", key="words"), wrong("y", "")]), played("b", [Answer(text="z")], reward=1.0)]
    yield [played("c", [wrong("x", " ", key="unfilled")])]
    yield [played("d", [wrong("x", "m" * 900, key="words")])]
    yield [played("e", [Answer(text="", error=wrong("").error, whole=False)])]


async def test_the_table_of_hints_has_what_becomes_of_errors() -> None:
    declined, left_out = reasons_in(sources), reasons_in(hinting, hint_pairs)
    assert listed(HINTS["hints/declined_REASON"]) == declined
    assert listed(HINTS["hints/left_out_REASON"]) == left_out
    made_of = {one.name for one in (FromTemplates, FromEnvironment, FromSiblings, FromModel)}
    assert set(get_args(HintSource)) == made_of
    names = documented(HINTS, SOURCE=made_of)
    channels = Channels()
    templates = FromTemplates(HintTemplates({"words": "Spell. {message}", "unfilled": "{message}"}))
    for one in (templates, FromEnvironment(), FromSiblings(min_reward=1.0)):
        for first in (1, None):
            channels.hinter = Hinter(HintWriter.of(TINY), [one], seq_len=500, first=first)
            for number, group in enumerate(errors()):
                hinted = await channels.hinted(group)
                finished = finish_group(group, GroupCredit(), [], group="g", hinted=hinted)
                channels.count_hints([finished])
                if number == 0:
                    channels.count_hints([replace(finished, withheld={"a": "repetition"})])
    emitted = channels.metrics().keys()
    missing = {"declined_model_late", "declined_model_failed", "declined_model_silent"}
    missing |= {"left_out_no_boundary", "left_out_not_written"}
    expected = names - {name for name in names if "REASON" in name or "/model_" in name or name.endswith("_model")}
    expected |= {f"hints/declined_{one}" for one in declined} | {f"hints/left_out_{one}" for one in left_out}
    assert emitted == expected - {f"hints/{one}" for one in missing}


async def test_the_table_of_hints_has_what_is_asked_of_the_model_that_writes_them() -> None:
    async with teachers_serving() as fake:
        fake.says["m"].append(status(400))
        made = ApiSettings(name="w", base_url=fake.base_url, model="m")
        model = open_hint_model(made, own_servers=lambda: (), own_api_key_var="X", base_model_name="m", seed=0)
        await asyncio.gather(*(model([{"role": "user", "content": word}]) for word in "xyy"), return_exceptions=True)
        channels = Channels(hint_model=model)
        emitted = channels.metrics().keys()
        await channels.close()
    told = {name for name in documented(HINTS, REASON={"refused"}) if name.startswith("hints/model_")}
    assert emitted == told


async def test_the_table_of_pairs_has_what_becomes_of_turns_and_questions(tmp_path: Path) -> None:
    skipped, reasons = reasons_in(verdicts, pairs), set(get_args(teachers.Reason))
    assert listed(PAIRS["pairs/skipped_REASON"]) == skipped
    assert listed(PAIRS["pairs/questions_REASON"]) == reasons
    emitted = await emitted_of_pairs(tmp_path / "nowhere" / "pairs.jsonl")
    always = {name for name in documented(PAIRS, TEACHER={"a", "b"}) if "REASON" not in name}
    sometimes = {name: "" for name in documented(PAIRS, TEACHER={"a", "b"}) if name != "pairs/skipped_REASON"}
    sometimes |= {f"pairs/skipped_{reason}": "" for reason in skipped}
    assert always <= emitted <= documented(sometimes, REASON=reasons)


def no_template(tools: Tools) -> ChatTemplate:
    """None takes tools."""
    if tools is not None:
        raise ValueError("the model's chat template takes no tools")
    return TEMPLATE


async def emitted_of_pairs(path: Path) -> set[str]:
    """The names of what is counted of a channel to which everything happens."""
    async with teachers_serving() as fake:
        fake.does["judge"] = lambda messages: "no"
        budget = Budget(dict.fromkeys(("a", "b", "judge"), Price()))
        asker, judge = (Asker([*map(fake.endpoint, names)], budget=budget) for names in (("a", "b"), ("judge",)))
        channel = DisagreementChannel(
            asker,
            Chooser(["all", "first_divergence"]),
            agreement_of("judge", judge=AskedJudge(judge)),
            Reference(),
            no_template,
            budget=budget,
            base_model="identity-1",
            sequence_len=1000,
            path=path,
            ready=ReadyPairs(max_ready=1, max_off_policy_steps=2),
            max_waiting=1,
            num_parallel=1,
            judge=judge,
        )
        numbers = count()

        async def offer(question: str, **more: Any) -> None:
            channel.offer([result(next(numbers), 0, question, "Y", **more)])
            await drained(channel)

        for question in ("first", "second", "second"):
            await offer(question)
        channel.take(9, step=11)
        await offer("of version 7, too late")
        channel.take(9, step=8)
        fake.does |= dict.fromkeys("ab", lambda messages: "Z")
        fake.says["judge"].append(status(400))
        await offer("the judge refuses")
        fake.says["a"].append(status(400))
        await offer("one refuses")
        await offer("no template", tools=[{"type": "function", "function": {"name": "go"}}])
        await offer("no JSON", tools=[object()])
        fake.says["a"].append(slow)
        for number in range(3):
            channel.offer([result(next(numbers), 0, f"{number}", "Y")])
        await channel.close()
        return set(channel.metrics())


# --- examples ---

ORCH = {"model": {"name": "m"}, "env": [{"id": "reverse-text"}], "rollouts_per_example": 4}
KEYS = "loss|buffer|teacher_model|hints|preferences"
BLOCKS = [
    re.sub("^    ", "", block, flags=re.M) for block in re.findall(r"(?:^    .*\n(?:\n(?=    ))?)+", PAGE, flags=re.M)
]
TEACHERS = re.findall(r"^    (teacher_model: .*)$", PAGE, flags=re.M)
[(DISTILLS, UNVERIFIED)] = re.findall(
    r"^    # train.yaml +# orch.yaml\n    (loss: \{.*?\}) +(buffer: .*)$", PAGE, flags=re.M
)
[DISAGREEMENT] = [block for block in BLOCKS if block.startswith("preferences:")]
INLINE = re.findall(rf"`((?:{KEYS}): [^`]+)`", PAGE)


def settings_of(folder: Path, *texts: str) -> tuple[TrainSettings, OrchSettings]:
    """The settings of the two programs with what `texts` set, each checked."""
    trees: dict[str, dict[str, Any]] = {"train": {"model": "m"}, "orch": dict(ORCH)}
    for text in texts:
        for key, value in yaml.safe_load(text).items():
            trees["train" if key == "loss" else "orch"][key] = value
    for name, tree in trees.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(tree))
    train, orch = load(TrainSettings, file=folder / "train.yaml"), load(OrchSettings, file=folder / "orch.yaml")
    joined_check(train, orch)
    return train.settings, orch.settings


def test_every_example_of_settings_is_known_to_these_tests() -> None:
    lines = re.findall(rf"^    (?:{KEYS}):", PAGE, flags=re.M)
    assert len(lines) == len(TEACHERS) + len([DISTILLS]) + len([DISAGREEMENT])
    assert len(TEACHERS) == 3


@pytest.mark.parametrize("teacher", TEACHERS)
def test_a_policy_learns_from_each_teacher_of_the_page_without_rewards(tmp_path: Path, teacher: str) -> None:
    train, orch = settings_of(tmp_path, DISTILLS, UNVERIFIED, teacher)
    assert (train.loss.adv_tau, train.loss.teacher_tau) == (0, 1)
    assert orch.teacher_model is not None
    assert orch.buffer.skip_verification


def test_the_teachers_of_the_page_may_disagree(tmp_path: Path) -> None:
    _, orch = settings_of(tmp_path, DISAGREEMENT, "loss: {beta_replay: 1}")
    assert [one.name for one in orch.preferences.teachers] == ["a", "b", "base"]


def test_what_the_text_says_of_settings_are_settings(tmp_path: Path) -> None:
    of_rewards = [text for text in INLINE if not text.startswith("buffer")]
    assert of_rewards
    settings_of(tmp_path, DISAGREEMENT, *of_rewards)


def test_the_file_of_hints_replaces_and_takes_away(tmp_path: Path) -> None:
    [block] = [block for block in BLOCKS if block.startswith("# hints.yaml")]
    (tmp_path / "hints.yaml").write_text(block)
    texts = HintTemplates.loaded(str(tmp_path / "hints.yaml"))
    keys = set(HintTemplates.loaded().keys)
    assert set(texts.keys) == keys - {"unclosed_call"}
    settings_of(tmp_path, f"hints: {{templates: {tmp_path / 'hints.yaml'}}}")
