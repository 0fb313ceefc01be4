#!/usr/bin/env python3
"""Gather the demo model's training text from documentation in Debian packages.

    python corpus.py WORK_DIR [--no-download]

Packages are fetched with `apt-get download` and unpacked with `dpkg -x` below WORK_DIR; nothing
is installed. The result is WORK_DIR/train.jsonl and WORK_DIR/heldout.jsonl, one document a line:
{"package", "kind", "path", "blocks"}, a block being [type, text] with type h1..h4, p, li or code.
WORK_DIR/sources.tsv lists package, version, licence names and characters kept.
"""
import argparse
import glob
import gzip
import hashlib
import json
import multiprocessing
import os
import re
import subprocess
import unicodedata

from lxml import etree, html

# (package, kind, path regular expression, repeat). `repeat` is how often train.py shows the
# documents in one pass: prose that reads well is worth more to a small model than terse text.
SOURCES = [
    ("debian-handbook", "prose", r"html/en-US/.*\.html$", 12),
    ("gimp-help-en", "prose", r"help/en/.*\.html$", 9),
    ("libreoffice-help-en-us", "prose", r"\.html$", 9),
    ("gnucash-docs", "prose", r"gnucash-(guide|manual|help)(-en|-C)?/.*\.html$", 12),
    ("gnome-user-docs", "prose", r"help/C/.*\.page$", 12),
    ("evolution-common", "prose", r"help/C/.*\.page$", 12),
    ("mate-user-guide", "prose", r"help/C/.*\.(docbook|xml)$", 9),
    ("gnome-devel-docs", "prose", r"help/C/.*\.page$", 2),
    ("kstars-data", "prose", r"HTML/en/.*\.docbook$", 12),
    ("kate5-data", "prose", r"HTML/en/.*\.docbook$", 9),
    ("kmymoney-common", "prose", r"HTML/en/.*\.docbook$", 12),
    ("debian-faq", "prose", r"\.en\.html$", 12),
    ("harden-doc", "prose", r"html/en-US/.*\.html$", 12),
    ("installation-guide-amd64", "prose", r"amd64/en/.*\.html$", 12),
    ("developers-reference", "prose", r"\.html$", 12),
    ("debian-reference-en", "prose", r"\.en\.html$", 9),
    ("maint-guide", "prose", r"\.en\.html$", 9),
    ("debian-policy", "prose", r"policy\.html/.*\.html$", 9),
    ("debian-kernel-handbook", "prose", r"\.html$", 9),
    ("aptitude-doc-en", "prose", r"\.html$", 9),
    ("live-manual-html", "prose", r"(\.en\.html|/en/.*\.html)$", 9),
    ("freedombox-doc-en", "prose", r"manual/en/.*\.html$", 9),
    ("ubuntu-packaging-guide-html", "prose", r"\.html$", 9),
    ("kicad-doc-en", "prose", r"\.html$", 9),
    ("png-definitive-guide", "prose", r"\.html$", 12),
    ("mh-book", "prose", r"\.html$", 9),
    ("gnumeric-doc", "prose", r"help/C/.*\.xml$", 9),
    ("renpy-doc", "prose", r"\.html$", 2),
    ("doc-debian", "prose", r"\.(txt|html)(\.gz)?$", 2),
    ("apache2-doc", "prose", r"manual/en/.*\.html$", 2),
    ("postgresql-doc-15", "prose", r"\.html$", 2),
    ("sqlite3-doc", "prose", r"\.html$", 2),
    ("python-django-doc", "prose", r"\.html$", 2),
    ("python-sqlalchemy-doc", "prose", r"html/(orm|core|tutorial|faq|dialects)/.*\.html$", 1),
    ("python-sklearn-doc", "prose", r"html/(modules|tutorial|developers)/[^/]*\.html$", 2),
    ("python-pandas-doc", "prose", r"(getting_started|user_guide|development)/.*\.html$", 2),
    ("rust-doc", "prose", r"html/(book|nomicon|reference|rust-by-example|cargo|rustc|rustdoc"
     r"|edition-guide|embedded-book)/.*\.html$", 2),
    ("ghc-doc", "prose", r"users_guide/.*\.html$", 1),
    ("lilypond-doc-html", "prose", r"Documentation/(learning|notation|usage|essay|music-glossary"
     r"|contributor|extending|changes)/.*\.html$", 2),
    ("linux-doc-6.1", "prose", r"html/(admin-guide|process|core-api|filesystems|networking"
     r"|driver-api|scheduler|mm|security|kernel-hacking|locking|maintainer|doc-guide|dev-tools"
     r"|power|block|timers|trace|RCU|virt|usb|input|sound|livepatch)/.*\.html$", 1),
    ("git-doc", "reference", r"\.html$", 2),
    ("python3.11-doc", "reference", r"html/(library|tutorial|howto|reference|faq|using"
     r"|whatsnew/[23]|extending|distributing|installing)[/.].*\.html$", 2),
    ("perl-doc", "reference", r"\.pod$", 1),
    ("manpages", "reference", r"\.\d\.gz$", 1),
    ("manpages-dev", "reference", r"\.\d\.gz$", 1),
    ("bash-doc", "reference", r"bashref\.html$", 2),
    ("zsh-doc", "reference", r"\.html$", 1),
    ("exim4-doc-html", "reference", r"\.html$", 1),
    ("postfix-doc", "reference", r"\.html$", 1),
    ("autoconf-doc", "reference", r"\.html$", 1),
    ("netcdf-doc", "reference", r"\.html$", 1),
    ("octave-doc", "reference", r"octave\.html/.*\.html$", 1),
    ("maxima-doc", "reference", r"\.html$", 1),
    ("r-doc-html", "reference", r"\.html$", 1),
    ("mit-scheme-doc", "reference", r"\.html$", 1),
    ("sbcl-doc", "reference", r"\.html$", 1),
    ("gnuplot-doc", "reference", r"\.html$", 1),
    ("groff", "reference", r"html/.*\.html$", 1),
    ("abs-guide", "code", r"\.html$", 1),
    ("c++-annotations-html", "code", r"\.html$", 1),
    ("libpython3.11-stdlib", "code", r"python3\.11/[^/]*\.py$|python3\.11/(asyncio|collections"
     r"|concurrent|email|http|importlib|json|logging|multiprocessing|unittest|urllib)/.*\.py$", 1),
    ("gnome-devel-docs", "code", r"gnome-devel-demos/.*\.(py|page)$", 1),
]
CHARACTER_CAP = 6_000_000  # per package, so that no single manual sets the tone
DROP_TAGS = {"script", "style", "nav", "header", "footer", "table", "form", "head", "noscript",
             "svg", "button", "select", "aside", "math", "video", "object", "iframe",
             "info", "revhistory", "authorgroup", "legalnotice", "indexterm", "comment",
             "screenshot", "bookinfo", "articleinfo", "keycombo-title", "desc", "credit"}
DROP_CLASS = re.compile(r"nav|sidebar|(^|[ _-])toc($|[ _-])|footer|header(link)?$|related"
                        r"|breadcrumb|^index|indexterm|searchbox|copyright|titlepage-meta"
                        r"|next|prev|up$"
                        r"|footnotes|toc_|contents$|section-toc|viewcode|headerbar|mini-toc", re.I)
BLOCK_TAGS = {"p", "para", "simpara", "dd", "dt", "li", "listitem", "div", "section", "sect1",
              "sect2", "sect3", "blockquote", "item", "title", "term", "h1", "h2", "h3", "h4",
              "h5", "h6", "pre", "ul", "ol", "dl", "steps", "list", "terms", "note", "body",
              "variablelist", "itemizedlist", "orderedlist", "programlisting", "screen"}
SPACE = re.compile(r"\s+")


def clean(text):
    text = text.replace("\u00b6", "").replace("\u00ad", "").replace("\u200b", "")
    text = text.replace("\u2019", "'").replace("\u2018", "'")
    text = text.replace("\u201c", '"').replace("\u201d", '"').replace("\u00a0", " ")
    return SPACE.sub(" ", unicodedata.normalize("NFC", text)).strip()


def local(element):
    return etree.QName(element).localname.lower() if isinstance(element.tag, str) else ""


def dropped(element):
    if local(element) in DROP_TAGS:
        return True
    marks = (element.get("class") or "").split() + [element.get("id") or "",
                                                    element.get("role") or ""]
    return any(mark and DROP_CLASS.search(mark) for mark in marks) and local(element) != "body"


def flat_text(element):
    parts = [element.text or ""]
    for child in element:
        if isinstance(child.tag, str) and not dropped(child):
            parts.append(flat_text(child))
        parts.append(child.tail or "")
    return "".join(parts)


def has_blocks(element):
    return any(local(e) in BLOCK_TAGS for e in element.iterdescendants())


def markup_blocks(element, blocks, depth, kind="p"):
    """Walk HTML, DocBook or Mallard markup; append [type, text] blocks in reading order."""
    pending = [element.text or ""]

    def flush():
        text = clean("".join(pending))
        pending.clear()
        if text:
            blocks.append([kind, text])

    for child in element:
        tag = local(child)
        if not tag or dropped(child):
            pending.append(child.tail or "")
            continue
        if re.fullmatch(r"h[1-6]", tag) or tag == "title":
            flush()
            level = int(tag[1]) if tag[0] == "h" else min(depth, 4)
            text = re.sub(r"^(Chapter |Appendix )?[\dA-Z]{0,3}(\.\d+)*\.?\s+(?=[A-Z])", "",
                          clean(flat_text(child)))
            if text:
                blocks.append([f"h{min(level, 4)}", text])
        elif tag in ("pre", "programlisting", "screen") or (
                tag == "code" and "\n" in (child.text or "") and local(element) in
                ("page", "section", "listing", "item", "example")):
            flush()
            code = unicodedata.normalize("NFC", flat_text(child)).strip("\n").rstrip()
            if code.strip():
                blocks.append(["code", "\n".join(s.rstrip() for s in code.split("\n"))])
        elif tag in BLOCK_TAGS:
            flush()
            inner = "li" if tag in ("li", "listitem", "item") else kind if tag != "p" else kind
            if tag in ("section", "sect1", "sect2", "sect3", "chapter"):
                inner = "p"
            markup_blocks(child, blocks, depth + (tag.startswith("sect")), inner)
        elif has_blocks(child):
            flush()
            markup_blocks(child, blocks, depth + (tag.startswith("sect")), kind)
        else:
            pending.append(flat_text(child))
        pending.append(child.tail or "")
    flush()


def read_markup(data, path):
    if re.search(r"\.html(\.en)?(\.gz)?$", path):
        text = data.decode("utf-8", "replace")
        text = re.sub(r"^\s*<\?xml[^>]*\?>", "", text)
        root = html.fromstring(text)
        for expression in ("//main", "//*[@role='main']", "//*[@id='DisplayArea']",
                           "//*[@id='main-content']", "//*[@id='content']", "//body"):
            found = root.xpath(expression)
            if found:
                root = found[0]
                break
    else:
        # entities declared elsewhere would stop the parser; their text is not worth chasing
        text = re.sub(rb"&(?!(amp|lt|gt|quot|apos|#\w+);)(\w[\w.-]*);", rb"\2", data)
        root = etree.fromstring(text, etree.XMLParser(recover=True, resolve_entities=False,
                                                      no_network=True, huge_tree=True))
    blocks = []
    if root is not None:
        markup_blocks(root, blocks, 1)
    return blocks


def pod_inline(text):
    for _ in range(4):
        text = re.sub(r"[BCEFIL]<<+ (.*?) >>+", r"\1", text)
        text = re.sub(r"L<([^<>|]*)\|[^<>]*>", r"\1", text)
        text = text.replace("E<lt>", "\x01").replace("E<gt>", "\x02")
        text = re.sub(r"[BCFIL]<([^<>]*)>", r"\1", text)
        text = re.sub(r"[XZSE]<([^<>]*)>", "", text)
    return text.replace("\x01", "<").replace("\x02", ">")


def read_pod(data):
    blocks, skipping = [], False
    for part in re.split(r"\n\s*\n", data.decode("utf-8", "replace")):
        if part.startswith("="):
            word, _, rest = part.partition(" ")
            skipping = word in ("=begin", "=for") or (skipping and word != "=end")
            if word.startswith("=head") and word[5:6].isdigit():
                blocks.append([f"h{min(int(word[5]), 4)}", clean(pod_inline(rest))])
            elif word == "=item" and len(clean(rest)) > 2:
                blocks.append(["li", clean(pod_inline(rest))])
        elif not skipping and part[:1] in " \t":
            blocks.append(["code", part.strip("\n")])
        elif not skipping and clean(part):
            blocks.append(["p", clean(pod_inline(part))])
    return blocks


def read_man(data):
    """Enough of the man macros to recover headings, paragraphs and displays."""
    blocks, words, code, in_code = [], [], [], False

    def plain(text):
        text = re.sub(r"\\f(\(..|\[[^]]*\]|.)", "", text)
        text = re.sub(r"\\\((\w\w)|\\\[(\w+)\]", lambda m: {
            "aq": "'", "dq": '"', "lq": '"', "rq": '"', "bu": "-", "em": "-", "en": "-",
            "ha": "^", "ti": "~", "rs": "\\", "+-": "+-", "co": "(c)"}.get(
                m.group(1) or m.group(2), ""), text)
        text = re.sub(r"\\[&,/|^:%]|\\s[-+]?\d", "", text)
        return text.replace("\\-", "-").replace("\\e", "\\").replace("\\ ", " ")

    def flush():
        text = clean(plain(" ".join(words)))
        words.clear()
        if text:
            blocks.append(["p", text])

    for line in data.decode("utf-8", "replace").split("\n"):
        if line.startswith((".\\\"", "'\\\"", "'")):
            continue
        if line.startswith("."):
            macro, _, rest = line[1:].strip().partition(" ")
            arguments = [a.strip('"') for a in re.findall(r'"[^"]*"|\S+', rest)]
            if macro in ("SH", "SS"):
                flush()
                title = clean(plain(" ".join(arguments)))
                blocks.append(["h2" if macro == "SH" else "h3", title.capitalize()])
            elif macro in ("nf", "EX"):
                flush()
                in_code = True
            elif macro in ("fi", "EE"):
                if code:
                    blocks.append(["code", plain("\n".join(code))])
                code, in_code = [], False
            elif macro in ("PP", "P", "LP", "TP", "IP", "HP", "RE", "RS", "TQ"):
                flush() if not in_code else None
            elif macro in ("B", "I", "R", "SM", "SB"):
                (code if in_code else words).append(" ".join(arguments))
            elif macro in ("BR", "RB", "IR", "RI", "BI", "IB"):
                (code if in_code else words).append("".join(arguments))
        else:
            (code if in_code else words).append(line)
    flush()
    return blocks


def read_text(data):
    text = data.decode("utf-8", "replace")
    return [["p", clean(part)] for part in re.split(r"\n\s*\n", text) if clean(part)]


def good_paragraph(kind, text):
    if kind == "code":
        return len(text) > 10
    letters = sum(c.isalpha() for c in text)
    if letters < 0.55 * len(text) or len(text) < 3:
        return False
    ascii_share = sum(ord(c) < 128 for c in text) / len(text)
    if ascii_share < 0.95:
        return False
    return kind != "p" or len(text) >= 25 or text[-1] in ".:!?"


ENGLISH = re.compile(r"\b(the|of|to|and|is|in|a|that|for|you|are|it|with)\b", re.I)


def load(job):
    package, kind, path, root = job
    try:
        with open(path, "rb") as handle:
            data = handle.read()
        name = path
        if path.endswith(".gz"):
            data, name = gzip.decompress(data), path[:-3]
        if name.endswith(".py"):
            text = unicodedata.normalize("NFC", data.decode("utf-8", "replace")).expandtabs(4)
            blocks = [["code", text.strip()]]
        elif name.endswith(".pod"):
            blocks = read_pod(data)
        elif re.search(r"\.\d$", name):
            blocks = read_man(data)
        elif name.endswith(".txt"):
            blocks = read_text(data)
        else:
            blocks = read_markup(data, name)
    except (OSError, ValueError, etree.LxmlError, RecursionError):
        return None
    if not name.endswith(".py"):
        blocks = [b for b in blocks if good_paragraph(*b)]
        words = " ".join(t for k, t in blocks if k in ("p", "li"))
        if kind != "code":
            # long listings teach a prose model little; keep the short ones, which it will be
            # asked to imitate
            blocks = [b for b in blocks if b[0] != "code" or len(b[1]) < 1200]
            listing = sum(len(t) for k, t in blocks if k == "code")
            if listing > (1.0 if kind == "prose" else 2.0) * len(words):
                return None
        if len(words) < 200 or len(ENGLISH.findall(words)) < len(words.split()) * 0.12:
            return None
    return {"package": package, "kind": kind, "path": os.path.relpath(path, root),
            "blocks": blocks}


def deduplicate(document, seen):
    kept = []
    for kind, text in document["blocks"]:
        if kind[0] != "h" and len(text) > 40:
            mark = hashlib.blake2b(text.lower().encode(), digest_size=8).digest()
            if mark in seen:
                continue
            seen.add(mark)
        kept.append([kind, text])
    # a heading whose section lost all of its text would teach the model to stop short
    rank = {"h1": 1, "h2": 2, "h3": 3, "h4": 4}
    result = []
    for i, block in enumerate(kept):
        if block[0] in rank:
            following = kept[i + 1][0] if i + 1 < len(kept) else "h1"
            if following in rank and rank[following] <= rank[block[0]]:
                continue
        result.append(block)
    document["blocks"] = result
    return sum(len(t) for _, t in result if _[0] != "h")


def licence_names(folder, package):
    names = []
    for path in glob.glob(f"{folder}/usr/share/doc/*/copyright*"):
        with open(path, encoding="utf-8", errors="replace") as handle:
            text = handle.read()
        names += re.findall(r"^License:[ \t]*(\S.*)$", text, re.M)
        names += re.findall(r"common-licenses/([\w.+-]*\w)", text)
    return sorted(set(name.strip() for name in names))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("work_dir")
    parser.add_argument("--no-download", action="store_true")
    options = parser.parse_args()
    work = os.path.abspath(options.work_dir)
    debs, unpacked = os.path.join(work, "debs"), os.path.join(work, "x")
    os.makedirs(debs, exist_ok=True)
    packages = list(dict.fromkeys(source[0] for source in SOURCES))
    versions = {}
    for package in packages:
        found = sorted(glob.glob(f"{debs}/{glob.escape(package)}_*.deb"))
        if not found and not options.no_download:
            subprocess.run(["apt-get", "download", "-qq", package], cwd=debs, check=False)
            found = sorted(glob.glob(f"{debs}/{glob.escape(package)}_*.deb"))
        if not found:
            print("no package", package)
            continue
        folder = os.path.join(unpacked, package)
        if not os.path.isdir(folder):
            os.makedirs(folder)
            subprocess.run(["dpkg", "-x", found[0], folder], check=True)
        versions[package] = subprocess.run(["dpkg-deb", "-f", found[0], "Version"], text=True,
                                           capture_output=True, check=True).stdout.strip()

    jobs, taken = [], set()
    # code rules come last in the table but claim their files first, so that they are not prose
    order = [s for s in SOURCES if s[1] == "code"] + [s for s in SOURCES if s[1] != "code"]
    for package, kind, pattern, _ in order:
        root = os.path.join(unpacked, package)
        for path in sorted(glob.glob(f"{glob.escape(root)}/**", recursive=True)):
            if path not in taken and os.path.isfile(path) and not os.path.islink(path) \
                    and re.search(pattern, os.path.relpath(path, root)) and "genindex" not in path:
                taken.add(path)
                jobs.append((package, kind, path, root))
    position = {source[:2]: i for i, source in enumerate(SOURCES)}
    jobs.sort(key=lambda job: (position[job[:2]], job[2]))
    with multiprocessing.Pool(2) as pool:
        documents = pool.map(load, jobs, chunksize=16)

    seen, sizes, held_sizes, kept = set(), {}, {}, {"train": [], "heldout": []}
    for document in documents:
        if document is None:
            continue
        package, kind = document["package"], document["kind"]
        if sizes.get(package, 0) > CHARACTER_CAP:
            continue
        size = deduplicate(document, seen)
        if size < 300:
            continue
        digest = hashlib.sha256(f"{package}/{document['path']}".encode()).digest()
        held = digest[0] * 256 + digest[1] < 65536 // 50
        kept["heldout" if held else "train"].append(document)
        if held:
            held_sizes[kind] = held_sizes.get(kind, 0) + size
        else:
            sizes[package] = sizes.get(package, 0) + size
    for split, rows in kept.items():
        with open(os.path.join(work, f"{split}.jsonl"), "w", encoding="utf-8") as out:
            for row in rows:
                out.write(json.dumps(row, ensure_ascii=False) + "\n")
    with open(os.path.join(work, "sources.tsv"), "w", encoding="utf-8") as out:
        for package in packages:
            if package in versions:
                names = licence_names(os.path.join(unpacked, package), package)
                out.write(f"{package}\t{versions[package]}\t{sizes.get(package, 0)}\t"
                          f"{'; '.join(names)}\n")
    print("characters kept", sum(sizes.values()), "held out", held_sizes)


if __name__ == "__main__":
    main()
