"""Models named by a hub id."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from diptych.engine.models.errors import ModelSourceError

_SMALL_FILES = ["*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_CONNECT_SECONDS = 10.0


def fetch_from_hub(
    repo_id: str, *, revision: str | None, with_weights: bool, report: Callable[[str], None]
) -> Path:
    """The snapshot's directory: fetched, or as cached earlier when the network isn't there.

    Raises `ModelSourceError` with one sentence that says what to do.
    """
    # Imported here: a local model needs no HTTP client. The client's base error comes from httpx or httpx2,
    # by the version of huggingface_hub, which imports the one that it raises.
    from huggingface_hub import errors as hub_errors
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    patterns = [*_SMALL_FILES, "*.safetensors"] if with_weights else _SMALL_FILES
    report(f"looking for {repo_id} on the hub")
    try:
        snapshot = Path(
            snapshot_download(
                repo_id, revision=revision, allow_patterns=patterns, etag_timeout=_CONNECT_SECONDS
            )
        )
    except HFValidationError:
        raise ModelSourceError(
            f"{repo_id!r} is neither a file or directory here nor a valid hub id (owner/name)"
        ) from None
    except GatedRepoError as error:
        raise ModelSourceError(f"{repo_id} is gated: accept its terms on the hub and set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise ModelSourceError(f"{repo_id} has no revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        raise ModelSourceError(f"the hub has no model {repo_id!r}, or it is private (HF_TOKEN)") from error
    except LocalEntryNotFoundError as error:
        raise ModelSourceError(
            f"{repo_id!r} is not in the local hub cache and the hub can't be reached; "
            "give a directory or a .gguf file, or check the network and HF_ENDPOINT"
        ) from error
    except (hub_errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]
        raise ModelSourceError(f"fetching {repo_id!r} from the hub failed: {error}") from error
    if not (snapshot / "config.json").exists():
        raise ModelSourceError(f"{repo_id!r} was found, but has no config.json")
    return snapshot
