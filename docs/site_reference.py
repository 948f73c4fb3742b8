"""The reference of the site: pages of the public names, and links from names in prose to them.

`site_pages` adds the pages to the site; `site_types` has the page of the types. `Docstrings` is an
extension of griffe, by which mkdocstrings reads the package. A public name without a docstring or a
group is an error.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import griffe
from griffe import Alias, Class, Object
from mkdocs.exceptions import PluginError

ROOT = Path(__file__).parents[1]

# The public packages, and the groups of names on their pages.
GROUPS: dict[str, dict[str, str]] = {
    "tagi_ddp": {
        "Training": "DDPSequential DDPConfig accelerate map_networks OutputUpdater",
        "Data": "DistributedSampler prepare reduce_metrics gather log progress seed_ranks",
        "Launching": "launch",
        "Communicators": "init Communicator",
        "Errors": "CommunicatorError Timeout PeerLost Mismatch BackendUnavailable NotFiniteError "
        "ReplicaMismatch MapError LaunchError",
    },
    "tagi_ddp.communicators": {
        "Communicators": "Communicator Levels init as_communicator Work ReduceOp Buffer BACKENDS "
        "all_gather_object",
        "Errors": "CommunicatorError Timeout PeerLost Mismatch BackendUnavailable",
    },
    "tagi_ddp.checkpoint": {
        "Checkpoints": "Checkpoints read_tree",
        "Errors": "CheckpointError DamagedFile Preempted",
    },
    "tagi_ddp.sklearn": {"Estimators": "TAGIRegressor TAGIClassifier"},
    "tagi_ddp.parallel": {
        "Wrappers": "dp ddp fsdp ParallelConfig full_state_dict ParallelMixin ProcessGroup",
        "Trainer": "BaseTrainer BaseTrainerConfig CheckpointConfig TrainerParallelConfig Task "
        "TaskModel State",
        "Callbacks": "Callback BestCheckpoint EarlyStopping CSVLogger TensorBoardLogger",
        "Uncertainty": "GaussianLoss PosteriorStatistics",
    },
    "tagi_ddp.sharding": {
        "Tensors": "shard_tensor gather_tensor sync_tensor reduce_tensor reduce_shard_tensor "
        "shard_heads shard_sequence",
        "Edges": "get_k_hop_edges sort_edges_1hop_sharding sort_edges_1hop_chunks",
        "Shapes": "get_shape_shards change_channels_in_shape get_memory_format",
    },
    "tagi_ddp.strategy": {
        "Groups": "DDPGroupStrategy DDPEnsGroupStrategy GroupLayout EnsembleLayout mixture",
        "Seeds": "seed_everything base_seed group_seed",
    },
    "tagi_ddp.optim": {
        "Data parallelism": "DataParallel DataParallelOptimizer",
        "DASO": "DASO DataParallelMultiGPU",
        "Schedules": "SyncSchedule Sync Skips",
    },
    "tagi_ddp.plan": {
        "Prediction": "predict search memory Training Cluster Link Choice SCHEMES default_ranks",
        "Measurement": "measure_link",
        "Output": "table plot",
    },
}
MODULES = list(GROUPS)

# The members of DDPSequential that most scripts use stand before the others.
FIRST = (
    "learn predict forward backward step train eval no_sync join steps merge save load state_dict "
    "load_state_dict check_replicas close"
)

_CODE = re.compile(
    r"(```.*?```|``.+?``|`[^`]+`(?:\{[^}]*\})?|\[[^\]]*\]\([^)]*\)|^#[^\n]*$)", re.S | re.M
)
_SECTIONS = re.compile(r"^(Args|Parameters|Attributes):$", re.MULTILINE)


@cache
def package() -> Object:
    """Return the package as griffe reads it."""
    return target(griffe.load("tagi_ddp", search_paths=[ROOT], resolve_aliases=True))


def target(thing: Object | Alias) -> Object:
    """Return what a name stands for."""
    return thing.final_target if isinstance(thing, Alias) else thing


def at(path: str) -> Object:
    """Return the object of a path, like "tagi_ddp.checkpoint.Checkpoints"."""
    inner = path.removeprefix("tagi_ddp").removeprefix(".")
    thing = target(package()[inner]) if inner else package()
    if isinstance(thing, griffe.Module) and path not in MODULES:
        return target(thing.members[thing.name])  # a function with the name of its file
    return thing


def public_names(module: str) -> list[str]:
    """Return the public names of a package. PluginError if one has no docstring or no group."""
    names = [str(name) for name in at(module).exports or [] if not str(name).startswith("_")]
    bare = [each for name in names for each in undocumented(at(f"{module}.{name}"))]
    if bare or not names:
        raise PluginError(f"{module} has public names without a docstring: {', '.join(bare)}")
    grouped = [name for group in GROUPS[module].values() for name in group.split()]
    if sorted(grouped) != sorted(names):
        wrong = ", ".join(sorted({*grouped} ^ {*names}))
        raise PluginError(f"GROUPS in {Path(__file__).name} and {module} differ: {wrong}")
    return grouped


def undocumented(thing: Object) -> list[str]:
    """Return the path of an object without a docstring, and those of its bare methods."""
    bare = [] if thing.has_docstring else [thing.path]
    if isinstance(thing, Class):
        for name, member in thing.members.items():
            inherited = any(name in base.members for base in thing.mro())
            if member.is_function and not name.startswith("_") and not inherited:
                bare += undocumented(target(member))
    return bare


def members(thing: Object) -> dict[str, Object]:
    """Return the members of a class that its entry shows, inherited ones too."""
    if not isinstance(thing, Class):
        return {}
    found = {name: target(each) for name, each in thing.all_members.items() if name[0] != "_"}
    return {name: each for name, each in found.items() if described(thing, name, each)}


def described(owner: Class, name: str, member: Object) -> bool:
    """Return whether a member, or what it overrides, has a docstring."""
    bases = [base.members[name] for base in owner.mro() if name in base.members]
    return any(target(each).has_docstring for each in (member, *bases))


@cache
def entries() -> dict[str, Object]:
    """Return all public names, and the members of classes, by the identifiers of their entries."""
    found = {module: at(module) for module in MODULES[1:]}
    for module in MODULES:
        for name in public_names(module):
            thing = found[f"{module}.{name}"] = at(f"{module}.{name}")
            found |= {f"{module}.{name}.{each}": it for each, it in members(thing).items()}
    return found


@cache
def owners() -> dict[str, str]:
    """Return the entry of the first class that is, or inherits from, the class of a path."""
    found: dict[str, str] = {}
    for entry, thing in entries().items():
        if isinstance(thing, Class):
            for each in (thing, *thing.mro()):
                found.setdefault(each.path, entry)
    return found


def entry_of(word: str, scope: tuple[str, ...]) -> str | None:
    """Return the entry that a word in backticks names, in the first of these scopes that has it."""
    name = word.partition("(")[0]
    places = [f"{place}.{name}" for place in scope]
    places += [name, name.replace("model.", "tagi_ddp.DDPSequential.", 1)]
    if not name.islower():  # plan's `table` is not meant by each table
        places += [f"{module}.{name}" for module in MODULES]
    return next((place for place in places if place in entries()), None)


def linked(text: str, scope: tuple[str, ...]) -> str:
    """Return prose whose words in backticks lead to the entries that they name."""

    def link(found: re.Match[str]) -> str:
        code = found[0]
        if not code.startswith("`") or code.startswith("``") or code.endswith("}"):
            return code
        entry = entry_of(code.strip("`"), scope)
        return code if entry is None else f"[{code}][{entry}]"

    return _CODE.sub(link, text)


def one_by_one(text: str) -> str:
    """Return a docstring in which "a, b: ..." describes parameters, or errors, one by one."""

    def split(found: re.Match[str]) -> str:
        names = found[1].split(", ")
        if names[0][0].isupper():
            return f"    {' | '.join(names)}: {found[2]}"  # errors, with one cause
        return "\n".join(f"    {name}: {found[2]}" for name in names)

    return re.sub(r"^ {4}(\w+(?:, \w+)+): (.*(?:\n {8}.*)*)", split, text, flags=re.MULTILINE)


def literal(text: str) -> str:
    """Return a docstring whose angle brackets stay: "cuda:<number>" has no element of HTML."""
    parts = _CODE.split(text)
    parts[::2] = [re.sub(r"<(?=[A-Za-z/!])", "&lt;", part) for part in parts[::2]]
    return re.sub("::$", ":", "".join(parts), flags=re.MULTILINE)


def show_functions(package: griffe.Module) -> None:
    """Resolve "tagi_ddp.plan.search" to the function, not to the file of that name."""
    for module in MODULES[1:]:
        home = target(package[module.removeprefix("tagi_ddp.")])
        for name in map(str, home.exports or []):
            if isinstance(file := home.members[name], griffe.Module):
                home.members[name] = Alias(name, file.members[name], parent=home)


class Docstrings(griffe.Extension):
    """Prepare docstrings for the site: links, angle brackets, and the sections of base classes."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Rewrite all docstrings of the package."""
        self._rewrite(pkg)
        loader.resolve_aliases()
        show_functions(pkg)

    def _rewrite(self, thing: Object) -> None:
        if isinstance(thing, Class):
            self._inherit(thing)
        if thing.docstring is not None:
            owner = thing if isinstance(thing, Class) or thing.parent is None else thing.parent
            home = ".".join(thing.path.split(".")[:2])
            scope = (owners().get(owner.path, ""), home, "tagi_ddp", "tagi_ddp.DDPSequential")
            text = linked(literal(one_by_one(thing.docstring.value)), scope)
            thing.docstring.value = re.sub(r"docs/([a-z-]+)\.md", page_link, text)
        for member in thing.members.values():
            if not isinstance(member, Alias):
                self._rewrite(member)

    def _inherit(self, thing: Class) -> None:
        """Give a class what only the docstrings of its bases describe."""
        original = at(thing.path)
        assert isinstance(original, Class)
        bases = [target(base) for base in original.mro()]
        for name, member in thing.members.items():
            if isinstance(member, griffe.Attribute) and member.docstring is None:
                declared = (base.members[name] for base in bases if name in base.members)
                found = next((each for each in declared if each.docstring is not None), None)
                if isinstance(found, griffe.Attribute):
                    member.docstring = copied(found.docstring, member)
                    member.annotation, member.value = found.annotation, None
        if thing.docstring is None:
            return
        if (init := thing.members.get("__init__")) is not None:
            init.docstring = None  # the class describes its parameters
        elif not _SECTIONS.search(thing.docstring.value):
            texts = [base.docstring.value for base in bases if base.docstring is not None]
            found = next(filter(None, map(_SECTIONS.search, texts)), None)
            thing.docstring.value += "" if found is None else f"\n\n{found.string[found.start() :]}"
        _, _, attributes = thing.docstring.value.partition("\nAttributes:\n")
        for name in re.findall(r"^ {4}(\w+):", attributes, re.MULTILINE):
            if name not in original.all_members:  # griffe takes the type of the one before for it
                thing.members[name] = griffe.Attribute(name, parent=thing)


def page_link(found: re.Match[str]) -> str:
    """Return a link from an entry to a page of docs/, by the page's title."""
    title = (ROOT / found[0]).read_text().partition("\n")[0].removeprefix("# ")
    return f"[{title}](../{found[1]}.md)"


def copied(docstring: griffe.Docstring, parent: Object) -> griffe.Docstring:
    """Return the docstring of a base class's member for one that has none."""
    return griffe.Docstring(docstring.value, parser="google", parent=parent)


# --- pages ---------------------------------------------------------------------------------------


def reference(module: str) -> str:
    """Return a page of all public names of a package, in groups."""
    boost = 4 if module == "tagi_ddp" else 2  # its names precede equal ones of other modules
    lines = ["---", f"search: {{ boost: {boost} }}", "---", f"# {module} {{#{module}}}", ""]
    text = linked(docstring(at(module)), (module,))
    lines += [re.sub(r"docs/([a-z-]+)\.md", page_link, text), ""]
    for group, names in GROUPS[module].items():
        lines += [f"## {group}", "", *table(module, names.split()), ""]
        for name in names.split():
            lines += [f"::: {module}.{name}", *options(at(f"{module}.{name}")), ""]
    return "\n".join(lines)


def options(thing: Object) -> list[str]:
    """Return how an entry differs from others: the order of its members, and its bases."""
    if not isinstance(thing, Class):
        return []
    first = [name for name in FIRST.split() if name in members(thing)]
    order = [*first, *(name for name in members(thing) if name not in first)]
    public = {each.name for each in entries().values()}
    bases = all(
        str(base) in public or str(base).endswith(("Error", "Exception")) for base in thing.bases
    )
    return [
        "    options:",
        f"      show_bases: {str(bases and bool(thing.bases)).lower()}",
        f"      members: [{', '.join(order)}]",
        f"      inherited_members: [{', '.join(order)}]",
    ]


def overview() -> str:
    """Return a page with a table of all public names."""
    lines = [
        "# Reference",
        "",
        "All public names, by package. `import tagi_ddp` is enough: the packages are imported when "
        "they are first used, and those that lack an [extra](../installation.md#extras) name it. "
        "[Types](types.md) explains the types in signatures.",
        "",
    ]
    for module in MODULES:
        lines += [f"## {module} {{#all-{module}}}", "", first_line(at(module)), ""]
        lines += [*table(module, public_names(module)), ""]
    return "\n".join(lines)


def table(module: str, names: list[str]) -> list[str]:
    """Return the rows of a table of names and the first lines of their docstrings."""
    scope = (module, "tagi_ddp")
    rows = [
        f"| [`{name}`][{module}.{name}] | "
        + linked(literal(first_line(at(f"{module}.{name}"))), scope).replace("|", "\\|")
        + " |"
        for name in names
    ]
    return ["| name | summary |", "|---|---|", *rows]


def docstring(thing: Object) -> str:
    """Return the docstring that a public name has."""
    assert thing.docstring is not None
    return thing.docstring.value


def first_line(thing: Object) -> str:
    """Return the first paragraph of a docstring."""
    return docstring(thing).partition("\n\n")[0].replace("\n", " ")
