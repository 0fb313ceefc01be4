#!/usr/bin/env python3
"""Draws tiers.svg: the tiers of memory, what each one holds, and what moves between them.

Usage: python3 bench/figures/tiers.py   (writes bench/figures/tiers.svg; no packages needed)
"""

from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 880, 430
INK, SOFT, PAPER = "#1f2933", "#52606d", "#ffffff"
COLOURS = {"disk": "#e4e7eb", "ram": "#d9ecff", "vram": "#dff5e1", "policy": "#fff3d6"}

parts = []


def text(x, y, words, size=14, anchor="middle", weight="normal", fill=INK):
    parts.append(
        f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" '
        f'font-weight="{weight}" fill="{fill}">{escape(words)}</text>'
    )


def box(x, y, width, height, fill, title, lines):
    parts.append(
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{fill}" '
        f'stroke="{SOFT}"/>'
    )
    text(x + width / 2, y + 24, title, 15, weight="bold")
    for i, line in enumerate(lines):
        text(x + width / 2, y + 46 + 19 * i, line, 12.5, fill=SOFT)


def slots(x, y, n, full, fill):
    """A row of slots, the first `full` of which hold a granule."""
    for i in range(n):
        colour = fill if i < full else PAPER
        parts.append(
            f'<rect x="{x + 17 * i}" y="{y}" width="13" height="20" rx="2" fill="{colour}" '
            f'stroke="{SOFT}"/>'
        )


def arrow(x1, y1, x2, y2, dashed=False):
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    parts.append(
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{INK}" stroke-width="1.6" '
        f'marker-end="url(#head)"{dash}/>'
    )


# The tiers, from left to right.
TOP, TALL = 60, 190
box(20, TOP, 210, TALL, COLOURS["disk"], "Disk", ["GGUF file: all experts", "cut into granules"])
slots(48, 150, 9, 9, "#9aa5b1")
slots(48, 176, 9, 9, "#9aa5b1")
slots(48, 202, 9, 9, "#9aa5b1")
box(330, TOP, 220, TALL, COLOURS["ram"], "RAM",
    ["expert slots within --ram", "dense weights, unless in VRAM"])
slots(372, 150, 8, 6, "#4098d7")
slots(372, 176, 8, 4, "#4098d7")
text(440, 224, "CPU computes", 13, weight="bold")
text(440, 241, "experts that are not in VRAM", 12, fill=SOFT)
box(650, TOP, 210, TALL, COLOURS["vram"], "VRAM",
    ["expert slots within --vram", "dense weights and KV cache"])
slots(695, 150, 7, 6, "#57ae5b")
text(755, 224, "GPU computes", 13, weight="bold")
text(755, 241, "dense layers, experts in VRAM", 12, fill=SOFT)

# Moving granules.
arrow(230, 120, 328, 120)
text(279, 112, "granules", 12.5)
text(279, 137, "io_uring", 12, fill=SOFT)
arrow(550, 120, 648, 120)
text(599, 112, "granules", 12.5)
text(599, 137, "PCIe", 12, fill=SOFT)
arrow(550, 190, 648, 190)
arrow(648, 196, 550, 196)
text(599, 182, "activations", 12.5)
text(599, 213, "sums", 12.5)

# Policies.
box(210, 318, 460, 88, COLOURS["policy"], "Layer loop and policy",
    ["the router's choice: demand, served first",
     "the predictor's guess: prefetch, at most one granule ahead of demand"])
arrow(279, 318, 279, 145, True)
arrow(440, 318, 440, 254, True)
arrow(599, 318, 599, 221, True)
text(289, 290, "read", 12.5, anchor="start")
text(450, 290, "evict", 12.5, anchor="start")
text(609, 290, "upload", 12.5, anchor="start")
HEADING = "Experts are read, moved and computed in granules; results do not depend on the place."
text(440, 34, HEADING, 14, weight="bold")

svg = (
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
    f'font-family="Helvetica, Arial, sans-serif" role="img" '
    f'aria-label="Experts move in granules from disk to RAM to VRAM">\n'
    '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
    f'markerHeight="7" orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="{INK}"/>'
    "</marker></defs>\n"
    f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}"/>\n' + "\n".join(parts) + "\n</svg>\n"
)
Path(__file__).with_suffix(".svg").write_text(svg)
