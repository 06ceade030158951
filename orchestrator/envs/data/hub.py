"""Finds the files of a data set: a file, a folder, or a name of the Hugging Face Hub, of which only what has been
downloaded before is used."""

import re
from pathlib import Path

from orchestrator.envs.data.files import READERS, BadData

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")


def find_files(path: str, *, subset: str | None, split: str) -> list[Path]:
    """The files of one split. `path`: a file, which is one split whatever it is called; a folder of files as the Hub
    has them; or `owner/name` of the Hub. Raises BadData with what there is, and how to get what is missing."""
    place = Path(path).expanduser()
    if place.is_file():
        if subset is not None:
            raise BadData(f"subset = {subset!r} has no effect on {path}, which is one file; remove it")
        return [place]
    folder = place if place.is_dir() else _downloaded(path)
    named = _named_files(folder)
    if subset is not None and subset not in named:
        raise BadData(f"{path} has no subset {subset!r}; there are {', '.join(named) or 'none'}")
    if subset is None and len(named) > 1:
        if "default" not in named:
            raise BadData(f"{path} has several subsets; set subset to one of {', '.join(named)}")
        subset = "default"
    splits = named[subset] if subset is not None else next(iter(named.values()), {})
    if split not in splits:
        known = f"there are {', '.join(splits)}" if splits else f"there are no files with {', '.join(READERS)}"
        raise BadData(f"{path} has no split {split!r}: {known}")
    return splits[split]


def _downloaded(name: str) -> Path:
    """The folder of a data set in the cache of the Hub. Nothing is fetched."""
    if _HUB_NAME.fullmatch(name) is None or Path(name).suffix in READERS:
        raise BadData(f"{name}: no such file or folder, seen from {Path.cwd()}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, repo_type="dataset", local_files_only=True))
    except LocalEntryNotFoundError:
        raise BadData(
            f"{name}: no such folder, and no data set that was downloaded from the Hugging Face Hub; to download it: "
            f"hf download {name} --repo-type dataset"
        ) from None


def _named_files(folder: Path) -> dict[str, dict[str, list[Path]]]:
    """Files by subset and split. A split's name is a word of the file's name or of its folder's; where none has one,
    all is `train`. A folder in between is a subset."""
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in READERS and path.is_file())
    named: dict[str, dict[str, list[Path]]] = {}
    for path in files:
        if path.name in ("dataset_dict.json", "dataset_info.json", "state.json"):
            continue
        parts = path.relative_to(folder).parts
        split = next((word for part in reversed(parts) for word in _words(part) if word in _SPLITS), "train")
        above = [part for part in parts[:-1] if part != "data" and not set(_words(part)) & {*_SPLITS}]
        named.setdefault("/".join(above) or "default", {}).setdefault(split, []).append(path)
    return named


def _words(name: str) -> list[str]:
    return re.split(r"[^a-z]+", name.lower())
