"""Contact sheets: thumbnails with their file names and a number each, as one PNG or one self-contained HTML file."""

import base64
import hashlib
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from curvssl.config import UserError
from curvssl.evaluate import maps
from curvssl.evaluate.search import Collection
from curvssl.files import count, printable, write_atomic, write_bytes
from curvssl.report.page import fitted

SIDE = 160  # pixels of a thumbnail
ACROSS = 8  # thumbnails in a row of the PNG
GAP, LINE, MARGIN = 16, 18, 28  # pixels between thumbnails, of a line of text, and around all
GROUPS, MEMBERS, OUTLIERS, LINES = 60, 12, 48, 100  # shown at most; the CSV files have all
STYLE = """
:root { color-scheme: light dark; --ink: #24292f; --faint: #6e7781; --line: #d0d7de; --paper: #fff; --mark: #0969da; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --faint: #9198a1; --line: #3d444d; --paper: #0d1117; --mark: #4493f8; }
}
body { margin: 2rem auto; max-width: 80rem; padding: 0 1rem; color: var(--ink); background: var(--paper);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.35rem; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .2rem; }
p { margin: .2rem 0; color: var(--faint); }
h1, h2, p, span, small { overflow-wrap: anywhere; }
div { display: flex; flex-wrap: wrap; align-items: flex-start; gap: 1rem; margin-top: .8rem; }
ol { list-style: none; margin: 0; padding: .8rem; display: flex; flex-wrap: wrap; gap: 1rem .8rem;
  border: 1px solid var(--line); border-radius: 8px; }
li { width: 8.6rem; }
img { display: block; width: 100%; aspect-ratio: 1; object-fit: contain; border-radius: 4px; }
li.first img { outline: 3px solid var(--mark); outline-offset: 2px; }
span, small { display: block; line-height: 1.3; }
span { margin-top: .4rem; font-size: .82rem; }
small { margin-top: .15rem; color: var(--faint); font-variant-numeric: tabular-nums; }
"""


@dataclass(frozen=True)
class Tile:
    pixels: np.ndarray  # uint8 (C, H, W)
    name: str
    note: str
    first: bool = False  # what the others of its row are compared with


@dataclass(frozen=True)
class Section:
    title: str
    text: list[str]  # line by line
    rows: list[list[Tile]]


# ---- what is shown


def of_search(result: dict[str, Any], collection: Collection, queries: np.ndarray) -> list[Section]:
    """One section for each query: the image, and what was found."""
    sections = []
    for query, pixels in zip(result["queries"], queries, strict=True):
        found = query["found"]
        notes = [f"{one['similarity']:.4f}{', same pixels' if one['same'] else ''}" for one in found]
        tiles = [Tile(pixels, query["image"], "the query", first=True), *tiles_of(collection, found, notes)]
        text = [f"among {count(len(collection), 'image')} of {collection.name}"]
        sections.append(Section(f"Like {query['image']}", text, [tiles]))
    return sections


def of_inspection(result: dict[str, Any], collection: Collection) -> list[Section]:
    """Near-duplicates, a row for each group; outliers; typical images; unreadable files."""
    return [
        _near_duplicates(result["near_duplicates"], collection),
        _outliers(result["outliers"], collection),
        Section(
            "Typical images",
            ["The images are divided into parts that are alike. Of each part this is the most central image."],
            [
                tiles_of(
                    collection,
                    result["typical"],
                    [f"stands for {count(one['stands_for'], 'image')}" for one in result["typical"]],
                )
            ],
        ),
        Section(
            count(len(result["unreadable"]), "unreadable file"),
            [f"{one['name']}: {one['error']}" for one in result["unreadable"][:LINES]],
            [],
        ),
    ]


def _near_duplicates(found: dict[str, Any], collection: Collection) -> Section:
    groups, rows = found["groups"], []
    for group in groups[:GROUPS]:
        notes = ["the first of its group", *(f"similarity {one['similarity']:.4f}" for one in group[1:])]
        if len(group) > MEMBERS:
            notes[MEMBERS - 1] += f", and {len(group) - MEMBERS:,} more"
        rows.append(tiles_of(collection, group[:MEMBERS], notes[:MEMBERS]))
    text = f"Each is like another of its group: by a similarity of {found['threshold']:.4f} or more, and by its pixels."
    left = f" The first {GROUPS} groups are shown; near-duplicates.csv has all." if len(groups) > GROUPS else ""
    return Section(f"{count(len(groups), 'group')} of near-duplicates", [text + left], rows)


def _outliers(found: dict[str, Any], collection: Collection) -> Section:
    ranked = found["ranked"][:OUTLIERS]
    text = f"Those with a score above {found['fence']:.2f}; the median image has about 1. outliers.csv has every image."
    notes = [f"score {one['score']:.2f}" for one in ranked]
    return Section(count(found["beyond"], "outlier"), [text], [tiles_of(collection, ranked, notes)])


def tiles_of(collection: Collection, found: Sequence[dict[str, Any]], notes: Sequence[str]) -> list[Tile]:
    pixels = collection.pixels([one["row"] for one in found], side=SIDE).numpy()
    return [Tile(image, one["name"], note) for image, one, note in zip(pixels, found, notes, strict=True)]


# ---- how it is written


def write(sections: Sequence[Section], out: Path, *, title: str) -> Path:
    """Write a .png or .html."""
    kind = out.suffix.lower()
    if kind == ".html":
        write_bytes(out, page(sections, title=title).encode(errors="backslashreplace"))
    elif kind == ".png":
        picture = drawn(sections, title=title)
        write_atomic(out, lambda file: picture.save(file, "PNG"))
    else:
        raise UserError(f"{out} needs to end in .png or .html")
    return out


def page(sections: Sequence[Section], *, title: str) -> str:
    """The sheet as HTML that needs no other file. No script runs in it, whatever a file is called."""
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    body = [f"<h1>{_text(title)}</h1>"]
    for section in sections:
        body += [f"<h2>{_text(section.title)}</h2>", *(f"<p>{_text(line)}</p>" for line in section.text), "<div>"]
        body += ["<ol>\n" + "\n".join(map(_item, row)) + "\n</ol>" for row in section.rows]
        body.append("</div>")
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>{STYLE}</style>\n" + "\n".join(body) + "\n</html>\n"
    )


def _item(tile: Tile) -> str:
    file = io.BytesIO()
    _picture(tile).save(file, "WEBP", quality=85)
    data = base64.b64encode(file.getvalue()).decode()
    image = f'<img src="data:image/webp;base64,{data}" alt="">'
    mark = ' class="first"' if tile.first else ""
    return (
        f"<li{mark}>{image}<span>{_text(tile.name).replace('/', '/<wbr>')}</span><small>{_text(tile.note)}</small></li>"
    )


def _text(text: str) -> str:
    return html.escape(printable(text))


def _picture(tile: Tile) -> Any:
    """One or three channels: any other number has no colours, and its mean is shown."""
    pixels = tile.pixels
    if len(pixels) not in (1, 3):
        pixels = pixels.mean(0, keepdims=True).astype(np.uint8)
    return fitted(pixels, side=SIDE, enlarge=True)


def drawn(sections: Sequence[Section], *, title: str) -> Any:
    """The sheet as a PIL image."""
    from PIL import Image, ImageDraw

    step, cell = SIDE + GAP, SIDE + 2 * LINE + GAP
    widest = max((len(row) for section in sections for row in section.rows), default=1)
    width = 2 * MARGIN + max(4, min(ACROSS, widest)) * step - GAP
    lines = [-(-len(row) // ACROSS) for section in sections for row in section.rows]
    height = 3 * MARGIN + sum((3 + len(section.text)) * LINE for section in sections) + sum(lines) * cell
    if max(width, height) >= 2**16:
        raise UserError(f"the picture would have {width:,}×{height:,} pixels: write an .html instead")
    sheet = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(sheet)
    room = width - 2 * MARGIN
    y = MARGIN
    pen.text((MARGIN, y), _short(title, 20, room), font=_font(20), fill=maps.INK)
    y += 2 * LINE
    for section in sections:
        pen.text((MARGIN, y), _short(section.title, 15, room), font=_font(15), fill=maps.INK)
        y += LINE + 2
        for line in section.text:
            pen.text((MARGIN, y), _short(line, 12, room), font=_font(12), fill=maps.FAINT)
            y += LINE
        y += LINE - 2
        for row in section.rows:
            for i, tile in enumerate(row):
                x, top = MARGIN + i % ACROSS * step, y + i // ACROSS * cell
                image = _picture(tile)
                sheet.paste(image, (x + (SIDE - image.width) // 2, top + (SIDE - image.height) // 2))
                if tile.first:
                    pen.rectangle((x - 4, top - 4, x + SIDE + 3, top + SIDE + 3), outline=maps.COLOURS[0], width=3)
                pen.text((x, top + SIDE + 3), _short(tile.name, 12, SIDE), font=_font(12), fill=maps.INK)
                pen.text((x, top + SIDE + 3 + LINE), _short(tile.note, 12, SIDE), font=_font(12), fill=maps.FAINT)
            y += -(-len(row) // ACROSS) * cell
        y += LINE
    return sheet.crop((0, 0, width, y + MARGIN - LINE))


def _short(text: str, size: int, room: int) -> str:
    """The text, or its beginning and its longer end, so that it fits: a file's name is at the end of its path."""
    text = printable(text).encode(errors="backslashreplace").decode()
    font = _font(size)
    kept = len(text)
    short = text
    while font.getlength(short) > room and kept > 1:
        kept -= 1
        short = f"{text[: kept // 3]}…{text[len(text) - (kept - kept // 3) :]}"
    return short


def _font(size: int) -> Any:
    """DejaVu Sans, which comes with matplotlib: it has more letters than Pillow's own."""
    from matplotlib import get_data_path
    from PIL import ImageFont

    return ImageFont.truetype(str(Path(get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"), size)
