"""A checkpoint from the Hugging Face hub onto this disk, into the cache that all programs of this machine share.

It does not know the swarm or the catalog. What is fetched is chosen from the repository's own list: the weights that
its index names, the configuration and the tokenizer, and nothing that could be run. Endpoint, token and cache are the
library's own settings (HF_ENDPOINT, HF_TOKEN, HF_HOME). All calls block on the network.

Source: the hub's cache layout, models--ORG--NAME/{blobs,snapshots/COMMIT}; a blob is named by its ETag.
"""

from __future__ import annotations

import glob
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    HTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import disable_progress_bars

from kvasir_node.base.errors import CapacityError, DataError, NotFoundError, Unreachable, UsageError
from kvasir_node.model.architecture import architecture_of
from kvasir_node.model.checkpoint import CONFIG_FILE, INDEX_FILE, SIDE_FILES, SINGLE_FILE, read_config, read_weight_map

PREFIX = "hf:"
PROGRESS_INTERVAL_S = 0.5
DISK_SPARED_BYTES = 1 << 30  # of the disk, which a fetch never fills
Progress = Callable[[int, int], None]
"""(bytes here, bytes in all)."""


@dataclass(frozen=True, slots=True)
class HubRef:
    """hf:ORG/NAME or hf:ORG/NAME@REVISION; `revision` None = the newest."""

    repo: str
    revision: str | None

    @property
    def name(self) -> str:
        return self.repo.partition("/")[2]


def parse_hub_ref(ref: str) -> HubRef:
    """Raises UsageError for what is not one."""
    repo, _, revision = ref.removeprefix(PREFIX).partition("@")
    owner, slash, name = repo.partition("/")
    if not ref.startswith(PREFIX) or not (owner and slash and name) or "/" in name:
        raise UsageError(f"a model of the hub is written hf:ORG/NAME or hf:ORG/NAME@REVISION; got {ref[:100]!r}")
    return HubRef(repo, revision or None)


def fetch_checkpoint(
    ref: HubRef, progress: Progress, *, endpoint: str | None = None, cache_dir: Path | None = None
) -> Path:
    """The folder of a checkpoint that this version can serve. Files that are here are not fetched again; one that broke
    off goes on while this call lasts, and begins anew in a later one.

    Raises NotFoundError, UsageError for a repository that may not be read, DataError for one that holds no MoE model of
    a known family or no safetensors, CapacityError when the disk is too small, Unreachable when the hub is not there.
    """
    disable_progress_bars()
    cache = Path(cache_dir or constants.HF_HUB_CACHE).expanduser()
    with _errors_of(ref, endpoint):
        commit, files = _list_files(ref, endpoint)
        names = _small_files(ref, files)
        folder = Path(_download(ref, commit, names, endpoint, cache))
        _check_model(ref, folder)
        weights = _weights(folder, files)
        wanted = {name: files[name] for name in (*names, *weights)}
        blobs = folder.parent.parent / "blobs"
        _check_disk(ref, blobs, wanted)
        with _reported(blobs, list(wanted.values()), progress):
            _download(ref, commit, list(wanted), endpoint, cache)
    return folder


@dataclass(frozen=True, slots=True)
class _File:
    nbytes: int
    blob: str  # its name in the cache


def _list_files(ref: HubRef, endpoint: str | None) -> tuple[str, dict[str, _File]]:
    """The commit that the revision is now, and the plain files of the repository's top folder."""
    info = HfApi(endpoint=endpoint).model_info(ref.repo, revision=ref.revision, files_metadata=True)
    files: dict[str, _File] = {}
    for each in info.siblings or ():
        if "/" not in each.rfilename and each.size is not None:
            blob = each.lfs.sha256 if each.lfs is not None else each.blob_id or ""
            files[each.rfilename] = _File(each.size, blob)
    if info.sha is None:
        raise DataError(f"the hub tells no commit of {ref.repo}")
    return info.sha, files


def _small_files(ref: HubRef, files: Mapping[str, _File]) -> list[str]:
    if CONFIG_FILE not in files:
        raise DataError(f"{ref.repo} has no {CONFIG_FILE}, so it is not a model that can be served")
    if SINGLE_FILE not in files and INDEX_FILE not in files:
        shown = ", ".join(sorted(name for name in files if name.endswith((".bin", ".pt", ".pth", ".gguf", ".h5")))[:3])
        raise DataError(
            f"{ref.repo} has no safetensors ({shown or 'no weights at all'}); choose a repository that has "
            f"{SINGLE_FILE} or {INDEX_FILE}"
        )
    index = () if SINGLE_FILE in files else (INDEX_FILE,)
    return [name for name in dict.fromkeys((CONFIG_FILE, *SIDE_FILES, *index)) if name in files]


def _check_model(ref: HubRef, folder: Path) -> None:
    """Before gigabytes are fetched of what then cannot be served."""
    try:
        architecture_of(read_config(folder))
    except DataError as error:
        raise DataError(f"{ref.repo} cannot be served: {error}") from error


def _weights(folder: Path, files: Mapping[str, _File]) -> list[str]:
    """Safetensors files, as the index names them."""
    if SINGLE_FILE in files:
        return [SINGLE_FILE]
    names = sorted(set(read_weight_map(folder).values()))
    absent = next((name for name in names if name not in files or not name.endswith(".safetensors")), None)
    if absent is not None:
        raise DataError(f"{INDEX_FILE} names {absent[:100]!r}, which is not a safetensors file of the repository")
    return names


def _check_disk(ref: HubRef, blobs: Path, wanted: Mapping[str, _File]) -> None:
    missing = sum(file.nbytes for file in wanted.values() if not (blobs / file.blob).exists())
    free = shutil.disk_usage(blobs).free
    if missing and missing + DISK_SPARED_BYTES > free:
        raise CapacityError(
            f"{ref.repo} needs {missing} more bytes in {blobs.parent}, where {free} are free; free some disk space, or "
            "set HF_HOME to a folder on another disk"
        )


def _download(ref: HubRef, commit: str, names: Sequence[str], endpoint: str | None, cache: Path) -> str:
    if len(names) == 1:
        return str(
            Path(hf_hub_download(ref.repo, names[0], revision=commit, endpoint=endpoint, cache_dir=cache)).parent
        )
    patterns = [glob.escape(name) for name in names]
    return snapshot_download(ref.repo, revision=commit, endpoint=endpoint, cache_dir=cache, allow_patterns=patterns)


def _here(blobs: Path, files: Sequence[_File]) -> int:
    """Bytes of these files that are on the disk, unfinished ones included."""
    total = 0
    for file in files:
        found = [path for path in blobs.glob(f"{glob.escape(file.blob)}*") if path.name.startswith(file.blob)]
        total += min(file.nbytes, max((_size(path) for path in found), default=0))
    return total


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # it was finished, and has another name now
        return 0


@contextmanager
def _reported(blobs: Path, files: Sequence[_File], progress: Progress) -> Iterator[None]:
    """Looks at the disk now and then, because the library's own bars change with its version."""
    total, ended = sum(file.nbytes for file in files), threading.Event()

    def report() -> None:
        while not ended.wait(PROGRESS_INTERVAL_S):
            progress(_here(blobs, files), total)

    progress(_here(blobs, files), total)
    thread = threading.Thread(target=report, name="progress", daemon=True)
    thread.start()
    try:
        yield
        progress(total, total)
    finally:
        ended.set()
        thread.join()


@contextmanager
def _errors_of(ref: HubRef, endpoint: str | None) -> Iterator[None]:
    """The library's errors as ours, each with what to do."""
    where = f"{endpoint or constants.ENDPOINT}/{ref.repo}"
    try:
        yield
    except HFValidationError as error:
        raise UsageError(f"{ref.repo!r} is not the name of a repository: {str(error)[:200]}") from error
    except GatedRepoError as error:
        raise UsageError(
            f"{ref.repo} is gated: accept its terms at {where}, and set HF_TOKEN to a token of your account"
        ) from error
    except RepositoryNotFoundError as error:
        raise NotFoundError(
            f"there is no {where}; check the spelling, and if it is private set HF_TOKEN to a token that may read it"
        ) from error
    except RevisionNotFoundError as error:
        raise NotFoundError(f"{where} has no revision {ref.revision!r}") from error
    except (HTTPError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
            raise CapacityError(f"cannot write {error.filename}: {error.strerror}; check HF_HOME") from error
        words = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise Unreachable(
            f"fetching {where}: {words}; what came is kept, so check the network and pull again"
        ) from error
