"""Digests of the files that a plan was made from, so that a run can tell whether they are still the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hflow.diagnostics import Diagnostic, HflowError
from hflow.graph.adapter import StoredAdapter
from hflow.graph.infer.functions import source_file
from hflow.graph.ir import Graph, Model, Node
from hflow.graph.row_sources import filter_functions
from hflow.plan.model_shape import NAMED

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
CHAT_TEMPLATE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
HEADER_BYTES = 100_000_000  # safetensors takes no longer header


@dataclass(frozen=True)
class Digests:
    """SHA-256, in hex, of what stood in files when the graph was compiled; what was not there is left out.

    `models`: by folder, of a model or an adapter, and name of the file; of safetensors only the
    header. `functions`: by
    reference, of the file that holds the function. `chats`: by path, of the chat templates and tools that
    nodes name.
    """

    models: Mapping[str, Mapping[str, str]]
    functions: Mapping[str, str]
    chats: Mapping[str, str] = field(default_factory=dict[str, str])


State = Literal["same", "changed", "gone", "unknown"]
CHAT_FILES = {"chat_template": ".jinja", "tools": ".json"}  # options that may name one, and how it ends


@dataclass(frozen=True)
class ModelFile:
    """A file of a model folder. `state`: ``unknown`` if this machine does not see the folder."""

    folder: str
    name: str
    digest: str
    state: State


@dataclass(frozen=True)
class FunctionFile:
    """A function that a plan runs, the `nodes` that do, and its `file`, None if it is not found.

    `state`: ``unknown`` if the file was not found when the graph was compiled.
    """

    reference: str
    nodes: tuple[str, ...]
    file: Path | None
    digest: str | None
    state: State


@dataclass(frozen=True)
class ChatFile:
    """A chat template, or tools, that `nodes` name. `state`: never ``unknown``."""

    file: str
    nodes: tuple[str, ...]
    digest: str
    state: State


def digests_of(graph: Graph) -> Digests:
    """Of the model folders, functions, chat templates and tools of a graph, as they are now."""
    folders = sorted({m.path for m in graph.models if not m.path.startswith(NAMED)})
    read = {reference: _file_digest(_found(reference)) for reference in _users(graph)}
    functions = {reference: digest for reference, digest in read.items() if digest}
    chats = {path: digest for path in _chat_users(graph) if (digest := _file_digest(Path(path)))}
    models = {folder: model_digests(Path(folder)) for folder in folders}
    for folder in sorted({m.adapter.path for m in graph.models if isinstance(m.adapter, StoredAdapter)}):
        models[folder] = {**models.get(folder, {}), **adapter_digests(Path(folder))}
    return Digests(models, functions, chats)


def adapter_digests(folder: Path) -> dict[str, str]:
    """Of the files in the folder of an adapter."""
    found = {
        ADAPTER_CONFIG: _file_digest(folder / ADAPTER_CONFIG),
        ADAPTER_WEIGHTS: _header_digest(folder / ADAPTER_WEIGHTS),
    }
    return {name: digest for name, digest in found.items() if digest}


def model_digests(folder: Path) -> dict[str, str]:
    """Of the files in a model folder that decide what is built, and which tokens texts have; those that are
    there, and of weights those that are loaded."""
    more = [f"{MORE_TEMPLATES}/{name}" for name in _more_templates(folder)]
    found = {name: _file_digest(folder / name) for name in (CONFIG, *TOKENIZER, CHAT_TEMPLATE, *more)}
    single = _header_digest(folder / SINGLE)
    found |= {SINGLE: single} if single else {INDEX: _file_digest(folder / INDEX)}
    return {name: digest for name, digest in found.items() if digest}


def changed_models(graph: Graph, then: Digests) -> Iterator[Diagnostic]:
    """HF406 for every model folder that is not what it was when the graph was compiled."""
    changed_in: dict[str, list[ModelFile]] = {}
    for found in model_files(then):
        if found.state in ("changed", "gone"):
            changed_in.setdefault(found.folder, []).append(found)
    folders = dict.fromkeys(folder for model in graph.models for folder in _folders(model))
    users = {folder: [u for u in graph.models if folder in _folders(u)] for folder in folders}
    for folder, models in users.items():
        changed = changed_in.get(folder, [])
        if not changed:
            continue
        names = f"model{'s' * (len(models) > 1)} {', '.join(f'`{m.name}`' for m in models)}"
        files = ", ".join(f"`{f.name}`" + " cannot be read" * (f.state == "gone") for f in changed)
        message = f"{names}: `{folder}` has changed since the graph was compiled: {files}"
        help_ = "compile the graph again; a plan holds what it has read of the model"
        yield Diagnostic("HF406", message, models[0].span, help_)


def model_files(then: Digests) -> tuple[ModelFile, ...]:
    """The files of model folders that the graph was compiled with, and whether they have changed."""
    return tuple(file for folder, files in then.models.items() for file in _model_files(folder, files))


def _model_files(folder: str, then: Mapping[str, str]) -> Iterator[ModelFile]:
    seen = _is_folder(Path(folder))
    now = model_digests(Path(folder)) | adapter_digests(Path(folder)) if seen else {}
    for name, digest in then.items():
        state = _compared(digest, now.get(name)) if seen else "unknown"
        yield ModelFile(folder, name, digest, state)


def changed_chats(graph: Graph, then: Digests) -> Iterator[Diagnostic]:
    """HF406 for every chat template and every file of tools that is not what it was when the graph was
    compiled. Of one that is not here, whoever reads it tells."""
    for found in (f for f in chat_files(graph, then) if f.state == "changed"):
        named = ", ".join(f"`{name}`" for name in found.nodes)
        message = f"{named}: `{found.file}` has changed since the graph was compiled"
        help_ = "compile the graph again; other prompts would come from it"
        span = next(n.span for n in _all_nodes(graph) if n.name == found.nodes[0])
        yield Diagnostic("HF406", message, span, help_)


def chat_files(graph: Graph, then: Digests) -> tuple[ChatFile, ...]:
    """The chat templates and tools that the graph was compiled with, and whether they have changed."""
    users = _chat_users(graph)
    return tuple(
        ChatFile(path, users[path], digest, _compared(digest, _file_digest(Path(path))))
        for path, digest in then.chats.items()
        if path in users
    )


def check_models(graph: Graph, then: Digests) -> None:
    """Raises HflowError HF406 where `changed_models` or `changed_chats` finds something."""
    if changed := (*changed_models(graph, then), *changed_chats(graph, then)):
        raise HflowError(changed)


def changed_functions(graph: Graph, then: Digests) -> Iterator[Diagnostic]:
    """A warning, HF306, for every file with functions that is not what it was when the graph was compiled."""
    by_file: dict[str, list[FunctionFile]] = {}
    for found in function_files(graph, then):
        if found.state in ("changed", "gone"):
            by_file.setdefault(str(found.file or found.reference), []).append(found)
    for file, changed in by_file.items():
        gone = changed[0].state == "gone"
        message = f"`{file}` cannot be read" if gone else f"`{file}` has changed since the graph was compiled"
        names = ", ".join(f"`{f.reference}`" for f in changed)
        help_ = f"the plan runs {names} as it is now; after a change of a signature, compile the graph again"
        span = next((n.span for n in _all_nodes(graph) if n.name == changed[0].nodes[0]), None)
        yield Diagnostic("HF306", message, span, help_, severity="warning")


def function_files(graph: Graph, then: Digests) -> tuple[FunctionFile, ...]:
    """The functions that a graph runs, in order of their first use, and whether their files have changed."""
    return tuple(_function_file(r, nodes, then.functions.get(r)) for r, nodes in _users(graph).items())


def _more_templates(folder: Path) -> list[str]:
    try:
        return sorted(file.name for file in (folder / MORE_TEMPLATES).glob("*.jinja"))
    except OSError:
        return []


def _compared(then: str, now: str | None) -> State:
    if now is None:
        return "gone"
    return "same" if now == then else "changed"


def _function_file(reference: str, nodes: tuple[str, ...], then: str | None) -> FunctionFile:
    file = _found(reference)
    state = _compared(then, _file_digest(file)) if then else "unknown"
    return FunctionFile(reference, nodes, file, then, state)


def _users(graph: Graph) -> dict[str, tuple[str, ...]]:
    """The nodes that use each function."""
    users: dict[str, tuple[str, ...]] = {}
    for node in _all_nodes(graph):
        functions = [node.function.reference] if node.function else []
        if node.op == "data":
            functions += filter_functions(node.options)
        for reference in functions:
            users[reference] = (*users.get(reference, ()), node.name)
    return users


def _chat_users(graph: Graph) -> dict[str, tuple[str, ...]]:
    """The nodes that name each chat template, or file of tools."""
    users: dict[str, tuple[str, ...]] = {}
    for node in _all_nodes(graph):
        written = ((node.options.get(name), ending) for name, ending in CHAT_FILES.items())
        for path in (p for p, ending in written if isinstance(p, str) and p.endswith(ending)):
            users[path] = (*users.get(path, ()), node.name)
    return users


def _all_nodes(graph: Graph) -> tuple[Node, ...]:
    return (*graph.nodes, *(node for named in graph.evaluations for node in named.nodes))


def _found(reference: str) -> Path | None:
    try:
        return source_file(reference)
    except HflowError:
        return None


def _folders(model: Model) -> tuple[str, ...]:
    """All that a model is read from."""
    return (model.path, model.adapter.path) if isinstance(model.adapter, StoredAdapter) else (model.path,)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # one above it may not be entered
        return False


def _file_digest(file: Path | None) -> str | None:
    """Of a whole file; None if there is none that can be read."""
    try:
        if file is None or not file.is_file():  # a pipe has no end
            return None
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError:
        return None


def _header_digest(file: Path) -> str | None:
    """Of the header of a safetensors file: names, dtypes, shapes and places of its tensors."""
    try:
        if not file.is_file():
            return None
        with file.open("rb") as opened:
            length = opened.read(8)
            header = opened.read(min(int.from_bytes(length, "little"), HEADER_BYTES))
    except OSError:
        return None
    return hashlib.sha256(length + header).hexdigest()
