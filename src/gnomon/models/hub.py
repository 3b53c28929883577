"""Uploads to the Hugging Face hub: what can be refused first, and a folder as one commit."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gnomon.core.errors import ConfigError, RunError
from gnomon.models import default
from gnomon.models.load import local_folder
from gnomon.models.place import BUILT_IN
from gnomon.models.token_strings import first_line

# What a loader reads: files of an earlier upload that a new one lacks would be read beside it.
_REPLACED = ["*.safetensors", "*.bin", "*.json", "*.jinja", "*.model", "*.py"]
_TOKEN = "run `hf auth login`, or set HF_TOKEN to a token that may write"


def check_repository(name: str) -> None:
    """Refuse what is no repository's name, as USER/NAME or ORGANIZATION/NAME.

    Raises:
        ConfigError: The message has a name that would do.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if not isinstance(name, str):
        raise ConfigError(f"repository is {type(name).__name__}; write USER/NAME")
    try:
        try_to_load_from_cache(name, "config.json")  # which checks the name first
    except HFValidationError as error:
        raise ConfigError(f"'{name}' is no repository of the hub: {first_line(error)}; write USER/NAME") from error
    if "/" not in name:
        raise ConfigError(f"'{name}' does not say whose repository it is; write hub:USER/{name}")


def check_account(repository: str, private: bool) -> None:
    """Ask the hub whether this user may write, and whether a repository that exists is as private as asked.

    Raises:
        ConfigError: There is no token, or none that may write; the repository exists with another visibility; the hub
            cannot be reached.
    """
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.errors import RepositoryNotFoundError

    dry = "or write the folder alone with --dry-run"
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"HF_HUB_OFFLINE forbids an upload to {repository}; unset it, {dry}")
    if get_token() is None:
        raise ConfigError(f"an upload to {repository} needs a token of the hub; {_TOKEN}, {dry}")
    try:
        # Asked before a model is exported, which takes long and would be for nothing.
        said = HfApi().whoami()
    except Exception as error:
        raise ConfigError(f"{constants.ENDPOINT} does not take the token: {first_line(error)}; {_TOKEN}") from error
    if said.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise ConfigError(f"the token of {said.get('name')} may only read; {_TOKEN}")
    try:
        is_private = HfApi().model_info(repository).private
    except RepositoryNotFoundError:
        return
    except Exception as error:
        raise ConfigError(
            f"{constants.ENDPOINT} does not say whether {repository} exists: {first_line(error)}"
        ) from error
    if is_private != private:
        there, typed = ("private", "leave --public out") if is_private else ("public", "say so with --public")
        raise ConfigError(f"{repository} exists and is {there}; {typed}, or name another repository")


def upload(folder: Path, repository: str, private: bool, message: str) -> str:
    """Put the files of ``folder`` into a repository, in one commit, and return its address.

    A repository that is not there is made. What a loader would read of an earlier upload is removed from it; files of
    other kinds and its history stay.

    Args:
        folder: Model files and their card.
        repository: USER/NAME.
        private: Whether a new repository is private.
        message: First line of the commit's message.

    Raises:
        RunError: The hub refused a file, or the connection broke; the repository is as before.
    """
    from huggingface_hub import HfApi

    try:
        address = HfApi().create_repo(repository, private=private, exist_ok=True)
        # One commit: a reader never sees a half of the files.
        HfApi().upload_folder(repo_id=repository, folder_path=folder, commit_message=message, delete_patterns=_REPLACED)
    except Exception as error:
        # The boundary of the hub's library: whatever it raises, the model is still in the run.
        cause = first_line(error.__cause__ or error)
        raise RunError(f"the upload to {repository} failed: {cause}; the model is whole in its run") from error
    return str(address)


def hub_name(model: str) -> str | None:
    """Return the name of a model on the hub; None for a folder, or one that is made here.

    >>> hub_name("Qwen/Qwen3-0.6B"), hub_name("smollm2-135m-instruct"), hub_name("tiny"), hub_name("/models/own")
    ('Qwen/Qwen3-0.6B', 'HuggingFaceTB/SmolLM2-135M-Instruct', None, None)
    """
    if model == default.NAME:
        return default.HUB
    try:
        check_repository(model)
    except ConfigError:
        return None
    return None if model in BUILT_IN or os.path.isdir(model) else model


def license_of(model: str) -> dict[str, str]:
    """Return what the card of a model, in its folder or the hub's cache, says of its license; empty where none does.

    Returns:
        Of the keys license, license_name and license_link those that are there.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.repocard import metadata_load

    if model == default.NAME:
        return {"license": default.LICENSE}
    folder = local_folder(model)
    cached = None if hub_name(model) is None else try_to_load_from_cache(model, "README.md")
    for place in (folder / "README.md" if folder else None, cached):
        if isinstance(place, str | Path) and os.path.isfile(place):
            try:
                said = metadata_load(place) or {}
            except Exception:
                # The boundary of a parser: a card that cannot be read says nothing.
                return {}
            keys = ("license", "license_name", "license_link")
            return {key: said[key] for key in keys if isinstance(said.get(key), str)}
    return {}


def card_header(name: str, results: Sequence[Mapping[str, Any]], **values: Any) -> str:
    """Return the metadata of a model card: YAML between two lines of dashes, with a model index for the results.

    Args:
        name: Of the model.
        results: Keywords of `huggingface_hub.EvalResult`, one a score.
        values: Keywords of `huggingface_hub.ModelCardData`; None and empty ones are left out.
    """
    from huggingface_hub import EvalResult, ModelCardData

    kept = {key: value for key, value in values.items() if value}
    if results:
        kept |= {"model_name": name, "eval_results": [EvalResult(**result) for result in results]}
    return f"---\n{ModelCardData(**kept).to_yaml()}\n---\n"
