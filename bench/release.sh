#!/usr/bin/env bash
# Builds what is released, and tries each part where nothing else of moeba is.
#
#   bench/release.sh           wheel, tarball and crate into target/dist, of the commit that is here
#   bench/release.sh --here    the wheel alone, for this machine's glibc, from the release build that
#                              `cargo test --release` has made
#
# A part is tried with an empty home folder and an empty environment: it is installed, and answers a
# question with the bundled model. The wheel wants glibc 2.28: zig's linker, which comes from
# PyPI with maturin, links against it whatever glibc is here. The tarball has that program.
set -euo pipefail
cd "$(dirname "$0")/.."
ROOT=$PWD
TARGET=${CARGO_TARGET_DIR:-$ROOT/target}
TRIPLE=x86_64-unknown-linux-gnu
GLIBC=manylinux_2_28
VERSION=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
NAME=moeba-$VERSION-x86_64-linux
DIST=$TARGET/dist
DATA=bench/wheel/data
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
rm -rf "$DIST" "$DATA"
mkdir -p "$DIST" "$DATA"

say() { printf '%4d s  %s\n' $SECONDS "$*"; }
size() { du -b "$1" | awk '{ printf "%.1f MiB", $1 / 1048576 }'; }

# The environment of someone who has just come: no home, no settings.
fresh() {
    rm -rf "$WORK/home"
    mkdir "$WORK/home"
    (cd "$WORK/home" && env -i HOME="$WORK/home" PATH=/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8 "$@")
}

# ask WHAT PROGRAM MODEL: one question, which has to end with an answer.
ask() {
    local began=$SECONDS answer
    answer=$(fresh "$2" run "$3" -p "What is a branch?" -n 40 --temp 0 --no-display-prompt 2> "$WORK/said") || {
        cat "$WORK/said" >&2
        echo "$1: no answer" >&2
        return 1
    }
    [ -n "${answer//[[:space:]]/}" ] || { echo "$1: an empty answer" >&2; return 1; }
    say "$1 answers in $((SECONDS - began)) s: ${answer:0:60}"
}

# stage PROGRAM FOLDER: share/, as an installation has it.
stage() {
    "$1" man -q --dir "$2/share/man/man1"
    "$1" completions -q bash --dir "$2/share/bash-completion/completions"
    "$1" completions -q zsh --dir "$2/share/zsh/site-functions"
    "$1" completions -q fish --dir "$2/share/fish/vendor_completions.d"
    mkdir -p "$2/share/moeba" "$2/share/doc/moeba"
    cp models/demo/moeba-demo.gguf "$2/share/moeba"
    cp LICENSE-MIT LICENSE-APACHE "$2/share/doc/moeba"
}

tools() {
    local python=$TARGET/wheel-python
    python3 -m venv "$python" && "$python/bin/python" -m pip install --quiet --no-deps --retries 1 \
        --timeout 30 -r bench/wheel/requirements.txt
}

# wheel ARGUMENTS OF MATURIN…
wheel() {
    (cd bench/wheel && PATH="$TARGET/wheel-python/bin:$PATH" maturin build --quiet --release --locked \
        --out "$DIST" "$@")
}

try_wheel() {
    local file
    file=$(echo "$DIST"/*.whl)
    python3 -m venv "$WORK/venv"
    fresh "$WORK/venv/bin/python" -m pip install --quiet --no-index "$file"
    [ -s "$WORK/venv/share/man/man1/moeba-run.1" ] || { echo "the wheel has no manual" >&2; return 1; }
    ask "the wheel, $(size "$file")," "$WORK/venv/bin/moeba" demo
}

tools
if [ "${1:-}" = --here ]; then
    stage "$TARGET/release/moeba" "$DATA/data"
    # With a test beside it, dependencies have the features that they have for tests: all is there.
    mkdir "$WORK/bin"
    printf '#!/bin/sh\n[ "$1" = rustc ] && shift && set -- build --test tidy "$@"\nexec "%s" "$@"\n' \
        "$(command -v cargo)" > "$WORK/bin/cargo"
    chmod +x "$WORK/bin/cargo"
    PATH="$WORK/bin:$PATH" wheel --compatibility linux
    try_wheel
    exit
fi

# The first build is for the program, whose manual and completions the second one takes along.
wheel --zig --compatibility "$GLIBC" --target "$TRIPLE"
PROGRAM=$TARGET/$TRIPLE/release/moeba
say "the program for $GLIBC is built, $(size "$PROGRAM")"
stage "$PROGRAM" "$DATA/data"
wheel --zig --compatibility "$GLIBC" --target "$TRIPLE"
try_wheel

mkdir -p "$WORK/$NAME/bin"
cp "$PROGRAM" "$WORK/$NAME/bin"
cp -r "$DATA/data/share" README.md CHANGELOG.md LICENSE-MIT LICENSE-APACHE "$WORK/$NAME"
tar -C "$WORK" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$(git log -1 --format=%ct)" \
    -czf "$DIST/$NAME.tar.gz" "$NAME"
(cd "$DIST" && sha256sum "$NAME.tar.gz" > "$NAME.tar.gz.sha256")
mkdir "$WORK/unpacked"
(cd "$DIST" && sha256sum --quiet --check "$NAME.tar.gz.sha256" && tar -C "$WORK/unpacked" -xzf "$NAME.tar.gz")
ask "the tarball, $(size "$DIST/$NAME.tar.gz")," "$WORK/unpacked/$NAME/bin/moeba" demo

# Built with nothing but the registry's files, which is also what a newcomer waits for.
cargo package --quiet --locked --no-verify
cp "$TARGET/package/moeba-$VERSION.crate" "$DIST"
tar -C "$WORK" -xzf "$DIST/moeba-$VERSION.crate"
began=$SECONDS
fresh CARGO_HOME="${CARGO_HOME:-$HOME/.cargo}" RUSTUP_HOME="${RUSTUP_HOME:-$HOME/.rustup}" \
    "$(command -v cargo)" install --quiet --locked --path "$WORK/moeba-$VERSION" --root "$WORK/root" \
    --target-dir "$WORK/build"
say "cargo install takes $((SECONDS - began)) s on $(nproc) cores"
ask "the crate, $(size "$DIST/moeba-$VERSION.crate")," "$WORK/root/bin/moeba" \
    "$ROOT/models/demo/moeba-demo.gguf"

(cd "$DIST" && ls -l | awk 'NR > 1 { printf "%10d  %s\n", $5, $9 }')
say "wheel, tarball and crate are in $DIST"
