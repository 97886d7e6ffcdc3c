#!/bin/sh
# Makes a virtual environment and installs into it; silent and quick once done.
#
#     sh scripts/bootstrap.sh VENV CONSTRAINTS REQUIREMENT...
#     sh scripts/bootstrap.sh .venv constraints.txt -e '.[dev]'
#
# The REQUIREMENTs are pip's. Installs again only when pyproject.toml, CONSTRAINTS,
# the REQUIREMENTs, this script, the list of packages or the checkout's place changed.
# Looks for Python >= 3.12 in $PYTHON, on PATH, among pyenv's versions and through uv.
set -eu

say() { printf 'bootstrap: %s\n' "$*" >&2; }
fail() {
    say "$*"
    exit 1
}

[ $# -ge 3 ] || fail "usage: bootstrap.sh VENV CONSTRAINTS REQUIREMENT..."
venv=$1
constraints=$2
shift 2
cd "$(dirname "$0")/.."
python=""
without_venv=""

# True if "$1" starts and is new enough. A name on PATH is not enough: pyenv's shims
# are there for every version installed, and fail for all but the selected ones.
runs() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' \
        >/dev/null 2>&1 </dev/null
}

# Sets $python to "$1" if it is usable. Debian ships pythons that lack ensurepip.
try() {
    runs "$1" || return 1
    if "$1" -c 'import ensurepip, venv' >/dev/null 2>&1 </dev/null; then
        python=$1
        return 0
    fi
    without_venv=${without_venv:-$1}
    return 1
}

find_uv() {
    for uv in uv "${HOME:-}/.local/bin/uv" "${HOME:-}/.cargo/bin/uv"; do
        if "$uv" --version >/dev/null 2>&1 </dev/null; then return 0; fi
    done
    uv=""
    return 1
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        if try "$PYTHON"; then return 0; fi
        say "PYTHON=$PYTHON is not a Python >= 3.12 with venv; looking further"
    fi
    for name in python3.12 python3.13 python3.14 python3; do
        if try "$name"; then return 0; fi
    done
    for pattern in 3.12 3.13 3.14 3; do
        for path in "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/$pattern"*/bin/python3; do
            if try "$path"; then return 0; fi
        done
    done
    if find_uv; then
        path=$("$uv" python find '>=3.12' 2>/dev/null </dev/null) || return 1
        if try "$path"; then return 0; fi
    fi
    return 1
}

make_venv() {
    if find_python; then
        say "making $venv with $("$python" --version 2>&1) ($python)"
        "$python" -m venv --clear "$venv" || fail "$python could not make $venv."
        return
    fi
    if find_uv; then
        # The one way that downloads a Python; --seed puts pip into the environment.
        say "no Python >= 3.12 here: asking uv for one"
        if "$uv" venv --seed --clear --python "${without_venv:-3.12}" "$venv"; then
            return
        fi
    fi
    if [ -n "$without_venv" ]; then
        fail "$without_venv lacks the venv module: install it (Debian, Ubuntu:" \
            "apt install python3-venv), or set PYTHON to another Python >= 3.12."
    fi
    fail "hlo-tools needs Python 3.12 or newer and found none: install it" \
        "(Ubuntu 24.04, Debian 13: apt install python3 python3-venv; macOS:" \
        "brew install python@3.12; any system: pyenv install 3.12, or" \
        "uv python install 3.12), or set PYTHON to the path of one."
}

# Everything that decides what is installed, and from where: a copied checkout must
# not run the code of the one it was copied from, and an editable install knows the
# top-level packages of its day only.
fingerprint() {
    cksum pyproject.toml "$constraints" scripts/bootstrap.sh
    ls -- */__init__.py
    printf '%s\n' "$PWD" "$venv" "$*"
}

stamp=$venv/.bootstrap-stamp
wanted=$(fingerprint "$@")
if runs "$venv/bin/python"; then
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi
    say "bringing $venv up to date"
else
    make_venv
    say "downloading and installing the packages; this takes some minutes"
fi
rm -f "$stamp"
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    "$venv/bin/python" -m ensurepip --default-pip >/dev/null ||
        fail "$venv has no pip and can not get one: remove $venv and try again."
fi
# A terminal gets pip's progress bars, a log only warnings: lost connections are such.
quiet=-q
if [ -t 1 ]; then quiet=; fi
"$venv/bin/python" -m pip install $quiet --disable-pip-version-check \
    -c "$constraints" "$@" || fail "pip could not install into $venv, the lines above" \
    "say why; the same command tries again."
printf '%s\n' "$wanted" >"$stamp"
say "$venv is ready"
