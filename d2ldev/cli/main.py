"""The ``d2ldev`` command and its subcommands."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from d2ldev import __version__
from d2ldev.bench.exercises import EXERCISES
from d2ldev.cli import bench as bench_command
from d2ldev.cli import conformance as conformance_command
from d2ldev.cli import doctor as doctor_command
from d2ldev.cli import new_backend as new_backend_command
from d2ldev.cli import tour as tour_command
from d2ldev.cli.screen import complain
from d2ldev.distributed.launcher import Launch
from d2ldev.distributed.launcher import launch as start
from d2ldev.errors import UnsupportedValueError
from d2ldev.options import MATMUL_PRECISIONS
from d2ldev.settings import MAX_VIRTUAL_GPUS

# A flag takes no value. typer shows a type beside it unless it has a name for the value.
_FLAG: dict[str, Any] = {"metavar": ""}


class _Group(typer.core.TyperGroup):
    """A group of commands whose ``--help`` is shown as a flag."""

    def get_help_option(self, ctx: Any) -> Any:
        return _without_value(super().get_help_option(ctx))


class _Command(typer.core.TyperCommand):
    """A command whose ``--help`` is shown as a flag."""

    def get_help_option(self, ctx: Any) -> Any:
        return _without_value(super().get_help_option(ctx))


def _without_value(option: Any) -> Any:
    if option is not None:
        option.metavar = ""
    return option


app = typer.Typer(
    name="d2ldev",
    cls=_Group,
    help="One device API for PyTorch, JAX, TensorFlow and MXNet.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

VirtualGpus = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=0,
        max=MAX_VIRTUAL_GPUS,
        help="Use N virtual GPUs, as D2LDEV_VIRTUAL_GPUS=N does.",
    ),
]

AsJson = Annotated[
    bool, typer.Option("--json", **_FLAG, help="Print one JSON document and nothing else.")
]


_FOLDER: dict[str, Any] = {"metavar": "DIR", "file_okay": False, "resolve_path": True}


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"d2ldev {__version__}")
        raise typer.Exit


@app.callback()
def d2ldev(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", **_FLAG, callback=_show_version, is_eager=True, help="Show the version."
        ),
    ] = False,
) -> None:
    """One device API for PyTorch, JAX, TensorFlow and MXNet.

    D2LDEV_BACKEND=torch (or jax, tensorflow, mxnet, reference) chooses the backend, and
    D2LDEV_VIRTUAL_GPUS=2 gives it two virtual GPUs.
    """
    for stream in (sys.stdout, sys.stderr):
        # A terminal without UTF-8 then shows a question mark, not a traceback.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


@app.command(cls=_Command)
def doctor(
    as_json: AsJson = False,
    every_backend: Annotated[
        bool,
        typer.Option(
            "--all", **_FLAG, help="Try every installed backend, each in its own process."
        ),
    ] = False,
) -> None:
    """Show the backends and devices of this machine, and compute on each device."""
    raise typer.Exit(doctor_command.run(as_json=as_json, every_backend=every_backend))


@app.command(cls=_Command)
def tour(
    virtual_gpus: VirtualGpus = None,
    notebook: Annotated[
        Path | None,
        typer.Option(
            **_FOLDER,
            help="Write the tutorials as notebooks into this folder, without running them.",
        ),
    ] = None,
) -> None:
    """Run the tutorials about GPUs on the active backend; show each cell with its output."""
    raise typer.Exit(tour_command.run(virtual_gpus=virtual_gpus, notebook=notebook))


@app.command(cls=_Command)
def conformance(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="The backend: torch, jax, reference ... A report with --merge, --compare.",
        ),
    ],
    further: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- PYTEST_ARGUMENTS",
            help="Options for pytest: -k EXPRESSION ... Further reports.",
        ),
    ] = None,
    require_gpus: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Fail with fewer than N GPUs.")
    ] = None,
    virtual_gpus: VirtualGpus = None,
    profile: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Run a profile: quick, default, everywhere, or nightly."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE",
            help="This module only: devices, tensors, models ... Repeat it for several.",
        ),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(**_FOLDER, help="Write the report into this folder.")
    ] = None,
    is_merge: Annotated[
        bool,
        typer.Option(
            "--merge", **_FLAG, help="Run nothing: make one matrix of reports, files or folders."
        ),
    ] = False,
    is_comparison: Annotated[
        bool,
        typer.Option(
            "--compare", **_FLAG, help="Run nothing: list what changed from OLD reports to NEW."
        ),
    ] = False,
    has_mutants: Annotated[
        bool,
        typer.Option(
            "--mutants", **_FLAG, help="Put mistakes into the backend: does the suite see them?"
        ),
    ] = False,
) -> None:
    """Run the conformance suite on a backend; the exit status is pytest's."""
    if is_merge or is_comparison:
        places = [Path(each) for each in (name, *(further or ()))]
        of_runs = {
            "--require-gpus": require_gpus,
            "--virtual-gpus": virtual_gpus,
            "--profile": profile,
            "--only": only or None,
            "--mutants": has_mutants or None,
        }
        given = [option for option, value in of_runs.items() if value is not None]
        if not is_comparison:
            raise typer.Exit(conformance_command.merge(places, report, given))
        given += ["--report"] * (report is not None) + ["--merge"] * is_merge
        raise typer.Exit(conformance_command.compare(places, given))
    request = conformance_command.Request(
        name=name,
        require_gpus=require_gpus,
        virtual_gpus=virtual_gpus,
        report=report,
        profile=profile,
        only=tuple(only or ()),
        extra=tuple(further or ()),
    )
    if has_mutants:
        of_suite = {
            "--require-gpus": require_gpus is not None,
            "--profile": profile is not None,
            "the options of pytest": bool(further),
        }
        refused = [option for option, is_given in of_suite.items() if is_given]
        raise typer.Exit(conformance_command.try_mutants(request, refused))
    raise typer.Exit(conformance_command.run(request))


@app.command(cls=_Command)
def new_backend(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name that will select it.")],
    folder: Annotated[
        Path, typer.Option(metavar="DIR", help="Make the folder d2ldev-NAME in this one.")
    ] = Path(),
) -> None:
    """Write the package of a backend of your own, which installs and runs at once."""
    raise typer.Exit(new_backend_command.run(name, folder))


@app.command(cls=_Command)
def bench(
    exercise: Annotated[
        str | None, typer.Argument(metavar="EXERCISE", help=f"One of {', '.join(EXERCISES)}.")
    ] = None,
    every_exercise: Annotated[
        bool, typer.Option("--all", **_FLAG, help="Measure all exercises.")
    ] = False,
    backends: Annotated[
        list[str] | None,
        typer.Option(
            "--backend",
            metavar="NAME",
            help="Measure this backend. Repeat it to compare backends, each in its own process.",
        ),
    ] = None,
    virtual_gpus: VirtualGpus = None,
    size: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, max=65536, help="The size of the exercise, in place of its default."
        ),
    ] = None,
    is_small: Annotated[
        bool,
        typer.Option(
            "--small", **_FLAG, help="Use small sizes to try it out; the figures mean little."
        ),
    ] = False,
    matmul_precision: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"The precision of products: {', '.join(MATMUL_PRECISIONS)}. Default: "
            "D2LDEV_MATMUL_PRECISION, or highest.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            dir_okay=False,
            help="Draw time against size, with a line for each device. For the exercise "
            f"{', '.join(name for name, each in EXERCISES.items() if each.has_sizes)}.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the exercises of the chapter "GPUs" on every device of a backend."""
    if every_exercise == (exercise is not None):
        raise typer.BadParameter(f"name an exercise, or --all: {', '.join(EXERCISES)}")
    if exercise is not None and exercise not in EXERCISES:
        raise typer.BadParameter(
            f"unknown exercise {exercise!r}: use one of {', '.join(EXERCISES)}"
        )
    if matmul_precision is not None and matmul_precision not in MATMUL_PRECISIONS:
        names = ", ".join(MATMUL_PRECISIONS)
        raise typer.BadParameter(f"unknown precision {matmul_precision!r}: use one of {names}")
    if size is not None and (every_exercise or is_small):
        raise typer.BadParameter("--size needs one exercise, without --all and --small")
    if plot is not None and (exercise is None or not EXERCISES[exercise].has_sizes):
        raise typer.BadParameter("--plot needs an exercise with sizes: d2ldev bench matmul")
    request = bench_command.Request(
        exercises=tuple(EXERCISES) if exercise is None else (exercise,),
        backends=tuple(backends or ()),
        virtual_gpus=virtual_gpus,
        size=size,
        is_small=is_small,
        matmul_precision=matmul_precision,
        as_json=as_json,
        plot=plot,
    )
    raise typer.Exit(bench_command.run(request))


@app.command(cls=_Command, context_settings={"allow_interspersed_args": False})
def launch(
    program: Annotated[
        list[str],
        typer.Argument(metavar="PROGRAM [ARGUMENTS]", help="A Python file, and its arguments."),
    ],
    processes: Annotated[
        int, typer.Option(metavar="N", min=1, help="The number of processes on this machine.")
    ] = 1,
    nodes: Annotated[int, typer.Option(metavar="N", min=1, help="The number of machines.")] = 1,
    node_rank: Annotated[
        int, typer.Option(metavar="N", min=0, help="The number of this machine, from 0.")
    ] = 0,
    address: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="The address of machine 0, to which the others connect."
        ),
    ] = "",
    restarts: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Restart all processes up to N times after a failure."
        ),
    ] = 0,
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=1,
            max=86400,
            help="A silent process is lost after this time. Default: D2LDEV_PEER_TIMEOUT, or 60.",
        ),
    ] = None,
    is_module: Annotated[
        bool, typer.Option("-m", "--module", **_FLAG, help="PROGRAM is a module, as for python -m.")
    ] = False,
) -> None:
    """Run a program in several processes, on one or several machines, to train one model.

    Each process gets torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR ...), and Trainer reads
    them. The exit status is that of the process that failed first.
    """
    command = [sys.executable, *(["-m"] if is_module else []), *program]
    request = Launch(command, processes, nodes, node_rank, address, restarts, timeout)
    try:
        request.check()
    except UnsupportedValueError as error:
        complain(str(error))
        raise typer.Exit(2) from error
    raise typer.Exit(start(request))
