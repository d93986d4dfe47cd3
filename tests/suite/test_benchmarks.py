"""The benchmarks: both sides of a row do the same, and results are kept of every framework."""

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from reference_backend import ReferenceFramework

import d2ldev
from d2ldev.training import feed

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
DEVICE_LOG = """
import json, sys
sys.path.insert(0, sys.argv[1])
import d2ldev
from device_log import rows

backend = d2ldev.get_backend("reference")
steps = []
learner = type(backend.learner(backend.mlp([1, 1])))
step = learner.step
learner.step = lambda self, inputs, y: steps.append(1) or step(self, inputs, y)
counts = []
for row in rows(backend, "gpu:0", 4, 4):
    for statement in (row.ours, row.theirs):
        steps.clear()
        exec(statement, dict(row.names))
        counts.append(len(steps))
print(json.dumps(counts))
"""
FILES = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import d2ldev
from files import results
from safetensors.numpy import load_file

folder = Path(sys.argv[2])
found = results(d2ldev.get_backend("reference"), folder, 2)
mine, plain = (load_file(folder / f"{name}.safetensors") for name in ("mine", "plain"))
same = [mine[name].tobytes() == plain[name].tobytes() for name in sorted({**mine, **plain})]
print(json.dumps([same, [result.value > 0 for result in found]]))
"""
# Each forgets what the one before it has found.
ANY_FOLDER = """
import runpy, sys
path, known = sys.path[:], {*sys.modules}
for program in sys.argv[1:]:
    runpy.run_path(program, run_name="a benchmark")
    sys.path[:] = path
    folder = program.rpartition("/")[0]
    for name in [*sys.modules]:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(folder):
            del sys.modules[name]
print(len(sys.argv) - 1)
"""


def run(program, *arguments):
    command = [sys.executable, "-c", program, str(BENCHMARKS), *map(str, arguments)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def import_benchmark(name):
    """A module of the benchmarks, whose others do not stay beside those of the tests."""
    path = sys.path[:]
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path[:] = path


def keep(name):
    return [json.loads(path.read_text()) for path in BENCHMARKS.glob(f"results/{name}-*.json")]


def test_both_sides_of_every_row_train_for_as_many_steps():
    assert run(DEVICE_LOG) == [100] * 6


def test_every_benchmark_finds_what_is_beside_it_where_python_leaves_its_folder_out(tmp_path):
    programs = [
        str(path)
        for path in sorted(BENCHMARKS.glob("*.py"))
        if "__main__" in path.read_text() and path.stem != "epochs"  # which is torch's alone
    ]
    done = subprocess.run(
        [sys.executable, "-P", "-c", ANY_FOLDER, *programs],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{len(programs)}\n", "")
    assert len(programs) >= 10


def test_both_sides_write_the_same_tensors(tmp_path):
    assert run(FILES, tmp_path) == [[True, True], [True] * 6]


def test_the_results_of_device_logs_name_where_they_were_measured():
    assert len(keep("device-log")) >= 4
    assert all(document["platform"] and document["machine"] for document in keep("device-log"))


def test_the_results_of_files_are_of_every_framework():
    assert len(keep("files")) >= 4
    assert all(document["machine"] and len(document["results"]) == 6 for document in keep("files"))


def test_of_several_runs_each_row_is_that_of_the_median_ratio():
    overhead, measure = import_benchmark("overhead"), import_benchmark("measure")

    def run(*values):
        return [measure.Result("", "", "", x, 1.0, x, "ratio", 1.0, "") for x in values]

    found = overhead.medians([run(3, 10, None), run(1, 30, None), run(2, 20, None)])
    assert [each.value for each in found] == [2, 20, None]
    assert [each.ours for each in found] == [2, 20, None]


# -- the peers -------------------------------------------------------------------------------------

WHAT = ("a name", "ours()", "theirs()")


@pytest.fixture(scope="module")
def work():
    return import_benchmark("against.work")


def test_a_ratio_is_the_median_of_the_rounds(work):
    result = work.compare(WHAT, "einops", ([1, 2, 9, 4, 5], [1, 1, 3, 1, 1]), 1.0, "because")
    assert (result.value, result.spread) == (3, (2, 4))
    assert (result.ours, result.theirs) == (4, 1)


@pytest.mark.parametrize(("ours", "note", "met"), [(2, "because", False), (1, "", True)])
def test_the_table_gives_the_reason_for_a_missed_aim(work, ours, note, met):
    result = work.compare(WHAT, "einops", ([ours] * 3, [1] * 3), 1.0, "because")
    assert (result.note, result.met) == (note, met)


def test_a_row_without_a_reason_says_where_the_aim_lies_in_the_spread(work):
    samples = [0.9, 0.9, 1.1, 1.2, 1.2], [1] * 5
    assert "between the quartiles" in work.compare(WHAT, "einops", samples, 1.0, "").note
    assert not work.compare(WHAT, "einops", ([1.1] * 5, [1] * 5), 1.0, "").note


def test_the_rows_that_miss_their_aim_come_first(work):
    made = [work.compare((name, "", ""), "einops", ([x] * 3, [1] * 3), 1.0, "") for name, x in ROWS]
    made.insert(1, work.not_installed(WHAT, "einops", 1.0))
    assert [row.name for row in work.sort_missed_first(made)] == ["c", "d", "a", "a name", "b"]


ROWS = (("a", 0.5), ("b", 1.0), ("c", 1.1), ("d", 3.0))


def test_a_missing_peer_is_named_with_its_install_line(work, monkeypatch):
    missing = work.Peer("einops", "no_such_module.at_all", "the-package")
    monkeypatch.setitem(work.PEERS, "einops", missing)
    names = {"einops": lambda: pytest.fail("asked for the names of what is not installed")}
    each = work.Work("a name", "None", {"native": "0", "einops": "1"}, peers=names, rounds=2)
    native, theirs = work.measure(each)
    assert native.value > 0
    assert (theirs.value, theirs.met) == (None, None)
    assert theirs.note == "not installed: pip install the-package"


def test_a_peer_has_the_aim_of_being_ahead_and_the_native_call_its_own(work):
    each = work.Work("a name", "None", {"by hand": "1", "native": "0"}, aim=7, rounds=2)
    assert {row.against: row.aim for row in work.measure(each)} == {"by hand": 1.0, "native": 7}


def test_every_way_runs_once_in_each_round(work):
    ran = []
    sides = [lambda name=name: ran.append(name) or len(ran) for name in "abc"]
    samples = work.in_turn(sides, 4)
    assert "".join(ran) == "abc" + "cba" + "abc" + "cba" + "abc"
    assert samples == [[6, 7, 12, 13], [5, 8, 11, 14], [4, 9, 10, 15]]


@pytest.mark.parametrize("framework", ["torch", "jax", "tensorflow", "mxnet"])
def test_no_row_that_is_kept_misses_its_aim_without_a_reason(framework):
    path = BENCHMARKS / "results" / f"peers-{framework}.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["results"]
    assert rows
    assert [row["name"] for row in rows if row["met"] is False and not row["note"]] == []


# -- what is kept ---------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", ["torch", "jax", "tensorflow", "mxnet"])
@pytest.mark.parametrize("benchmark", ["growth", "scaling"])
def test_a_kept_result_is_drawn_and_the_documents_show_it(benchmark, framework):
    name = f"{benchmark}-{framework}-cpu"
    results = BENCHMARKS / "results"
    assert json.loads((results / f"{name}.json").read_text(encoding="utf-8"))["results"]
    assert (results / "plots" / f"{name}.png").stat().st_size > 10_000
    speed = BENCHMARKS.parent / "docs" / "speed-tables.md"
    assert f"results/plots/{name}.png" in speed.read_text(encoding="utf-8")


def test_plots_are_drawn_of_the_results_that_are_kept(tmp_path, monkeypatch):
    """One framework's: another one's take as long, and differ in their numbers alone."""
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent / "tools"))
    plots = import_benchmark("plots")
    monkeypatch.setattr(plots, "PLOTS", tmp_path / "plots")
    for benchmark in (import_benchmark("growth"), import_benchmark("scaling")):
        draw = benchmark.plot

        def draw_or_read(found, path, draw=draw):
            draw(found, path) if "jax" in path.name else path.touch()

        monkeypatch.setattr(benchmark, "plot", draw_or_read)
    plots.main()
    drawn = {path.stem for path in (tmp_path / "plots").iterdir()}
    assert drawn == {path.stem for path in (BENCHMARKS / "results" / "plots").iterdir()}


# -- how cost grows --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def growth():
    return import_benchmark("growth")


@pytest.mark.parametrize(("power", "met"), [(1, True), (2, False)])
def test_a_quadratic_function_misses_its_aim(growth, power, met):
    samples = [growth.Sample(size, 1e-6 * size**power, 0, 0) for size in (10, 100, 1000)]
    work = growth.Growth("work", "work()", "leaves", (10, 100, 1000), lambda size: lambda: None)
    (result,) = growth.results_of(work, samples)
    assert result.value == pytest.approx(power)
    assert result.met is met


def test_memory_that_grows_with_the_steps_misses_its_aim(growth):
    memory = ("bytes a step", 100, growth._bytes_a_step)
    work = growth.Growth("work", "work()", "steps", (10, 1010), lambda size: None, memory)
    samples = [growth.Sample(10, 1, 0, 0), growth.Sample(1010, 101, 500_000, 0)]
    _, result = growth.results_of(work, samples)
    assert (result.value, result.met) == (500, False)


@pytest.mark.parametrize("prepares", [True, False])
def test_a_size_that_would_take_too_long_is_left_out_and_named(growth, prepares):
    def prepare(size):
        time.sleep(0.01 * size * prepares)
        return lambda: time.sleep(0.01 * size * (not prepares))

    work = growth.Growth("work", "work()", "leaves", (1, 1000), prepare)
    samples = growth.samples_of(work, 1, lambda: None)
    assert [sample.size for sample in samples] == [1]
    assert next(iter(growth.results_of(work, samples))).note.startswith("1,000 would take too")


def test_a_size_that_a_framework_cannot_make_ends_the_growth(growth):
    def prepare(size):
        if size == 100:
            raise RecursionError
        return lambda: None

    work = growth.Growth("work", "work()", "layers", (1, 10, 100), prepare)
    assert [sample.size for sample in growth.samples_of(work, 60, lambda: None)] == [1, 10]


def test_a_peak_is_what_a_run_holds_beside_what_was_there(growth):
    kept = [bytearray(2**25)]
    work = growth.Growth("work", "", "bytes", (2**25,), lambda size: lambda: kept and b"x" * size)
    (sample,) = growth.samples_of(work, 60, lambda: None)
    assert 2**25 <= sample.peak < 1.5 * 2**25


# -- what moves to a GPU ---------------------------------------------------------------------------


class Counted(list):
    """Batches that count how many of them were asked for."""

    read = 0

    def __iter__(self):
        for batch in super().__iter__():
            self.read += 1
            yield batch


@pytest.fixture
def transfers(monkeypatch):
    module = import_benchmark("transfers")

    def plain_copy(native):
        transfer = ReferenceFramework(1).tensors.transfer
        return lambda value: import_benchmark("batches").walk(
            value, lambda x: transfer([x], native, copy=True)[0]
        )

    monkeypatch.setitem(module.COPIES, "reference", plain_copy)
    return module


@pytest.fixture
def backend():
    return d2ldev.Backend(ReferenceFramework(virtual_gpus=1))


@pytest.fixture
def place(transfers, backend):
    return transfers.Place(backend, "gpu:0")


def arrays(place, found):
    """The values of a nesting, all of which is on the GPU."""
    named = place.backend.named_tensors(found)
    assert {place.backend.device_of(x) for x in named.values()} == {place.device}
    return {name: place.backend.to_numpy(x).tolist() for name, x in named.items()}


def test_both_sides_of_a_transfer_bring_the_same_to_the_gpu(transfers, place):
    copies = [row for row in transfers.rows(place, transfers.SMALL) if "wait" in row.names]
    counts = []
    for row in copies:
        found, batches = [], Counted(row.names.get("batches", []))
        names = row.names | {"wait": found.append, "batches": batches}
        exec(row.ours, dict(names))
        exec(row.theirs, dict(names))
        ours, theirs = (arrays(place, x) for x in found)
        assert ours == theirs
        counts.append((len(ours), batches.read))
    assert counts == [(1, 0), (3, 0), (2, 2 * transfers.SMALL.batches)]


def test_both_logs_have_the_same_norms_of_what_the_gpu_computes(transfers, place):
    *_, row = transfers.rows(place, transfers.SMALL)
    found = []

    def note_call(call):
        new = place.backend.ones(1)
        found.append((place.backend.device_of(new), call()))

    for statement in (row.ours, row.theirs):
        calls = {name: lambda call=row.names[name]: note_call(call) for name in ("log", "listed")}
        exec(statement, {**row.names, **calls})
    assert found[0] == found[1] == (place.device, [found[0][1][0]] * transfers.SMALL.products)


def test_an_epoch_and_the_one_without_transfers_take_the_same_steps(transfers, place, monkeypatch):
    epochs, plain, device_batches = [], [], feed.device_batches

    def note_call(framework, data, *args, **options):
        batches = list(data)
        epochs.append([str(place.backend.device_of(x)) for x, _ in batches])
        return device_batches(framework, batches, *args, **options)

    copy = place.plain
    monkeypatch.setattr(feed, "device_batches", note_call)
    monkeypatch.setattr(place, "plain", lambda batch: plain.append(batch) or copy(batch))
    transfers.epoch(place, transfers.SMALL._replace(epochs=1, batches=10))
    assert epochs == [["cpu"] * 10, ["gpu:0"] * 10] * 3
    assert len(plain) == 10 * len(epochs)


@pytest.mark.parametrize(("computing", "ratio"), [(4, 6 / 5), (8, 6 / 8)])
def test_an_epoch_is_compared_with_the_longer_of_both(
    transfers, place, monkeypatch, computing, ratio
):
    def clock():
        now = 0
        while True:
            for taken in (6, 5, computing, 5):
                now += taken
                yield now

    monkeypatch.setattr(transfers, "time", SimpleNamespace(perf_counter=clock().__next__))
    found = transfers.epoch(place, transfers.SMALL)
    assert (found.ours, found.value) == (6, ratio)
    alone = f"computing alone takes {computing / 6:.2f} of it, copying {5 / 6:.2f}"
    assert alone in found.note


@pytest.mark.parametrize("platform", ["cuda", "rocm", "mps"])
@pytest.mark.parametrize(("is_pinned", "of_copies"), [(True, 1 / 0.95), (False, None)])
def test_aims_are_those_of_hardware(
    transfers, backend, monkeypatch, platform, is_pinned, of_copies
):
    monkeypatch.setattr(backend, "platform", lambda device: platform)
    monkeypatch.setattr(transfers, "pins", lambda _: is_pinned)
    place = transfers.Place(backend, "gpu:0")
    found = [*transfers.rows(place, transfers.SMALL), transfers.epoch(place, transfers.SMALL)]
    assert [row.aim for row in found] == [of_copies, of_copies, of_copies, 1.1, 1.05]
    assert not any("hardware" in row.note for row in found)


def test_memory_is_pinned_where_the_framework_can(transfers, backend, monkeypatch):
    pinned = []

    def pin(_, value):
        copied = backend.copy(value)
        pinned.extend(copied if isinstance(copied, tuple) else [copied])
        return copied

    monkeypatch.setattr(transfers, "pins", lambda _: True)
    monkeypatch.setattr(transfers, "pin", pin)
    place = transfers.Place(backend, "gpu:0")
    first, _, third, _ = transfers.rows(place, transfers.SMALL)
    assert any(first.names["batch"] is x for x in pinned)
    assert all(any(x is y for y in pinned) for batch in third.names["batches"] for x in batch)
    assert third.note.startswith("from pinned memory")


def test_what_moves_to_virtual_gpus_is_shown_without_an_aim(
    transfers, tmp_path, monkeypatch, capsys
):
    small = transfers.Sizes(10, 2, 2, 2, 2, 1, 2)
    monkeypatch.setattr(transfers, "SMALL", small)
    file = tmp_path / "results.json"
    arguments = ["transfers.py", "--framework", "reference", "--small", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", arguments)
    transfers.main()
    found = json.loads(file.read_text())
    assert (found["device"], found["platform"]) == ("gpu:0", "virtual")
    assert [(row["aim"], row["met"]) for row in found["results"]] == [(None, None)] * 5
    assert all(row["value"] > 0 for row in found["results"])
    assert all("nothing about hardware follows" in row["note"] for row in found["results"])
    assert "what moves to gpu:0 (virtual), reference" in capsys.readouterr().out
