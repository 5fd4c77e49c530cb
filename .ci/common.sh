# Shared by the scripts of this folder, which source it first: strict mode, the repository as the
# current folder, a scratch folder that is removed at the end.
set -euo pipefail
started_in=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# What a shell on this machine may carry around must not change what is built or tested.
unset PYTHONPATH PYTHONHOME PYTHONSTARTUP VIRTUAL_ENV MTPLX_ISA CC CFLAGS LDFLAGS CMAKE_ARGS SKBUILD_CMAKE_ARGS
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_QUIET=2
export CI_STARTED=${CI_STARTED:-$EPOCHSECONDS} # of the outermost of these scripts

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

say() {
    printf '\n== %s (after %d s)\n' "$*" "$((EPOCHSECONDS - CI_STARTED))"
}

fail() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

# Shows what a command prints only when it fails.
quietly() {
    "$@" >"$scratch/log" 2>&1 || { cat "$scratch/log" >&2; fail "$1 failed"; }
}

# Ends the script, successfully, for a reason.
skip() {
    printf '%s: skipped: %s\n' "${0##*/}" "$*"
    exit 0
}

need() {
    local tool
    for tool in "$@"; do
        command -v "$tool" >/dev/null || skip "$tool is absent"
    done
}

# The full name of an interpreter that was named on the command line; not resolved, for a virtual
# environment is found by its link.
interpreter() {
    (cd "$started_in" && found=$(command -v "$1") && realpath --no-symlinks "$found") || fail "there is no '$1'"
}

# What a clone would hold, with the edits that are not committed yet: nothing else that lies about
# in the work tree can help a build along, and no build leaves anything in it.
copy_tracked() {
    mkdir -p "$1"
    git ls-files -z --cached | tar --create --null --files-from=- | tar --extract --directory="$1"
}

new_venv() {
    "${2:-${PYTHON:-python3}}" -m venv "$1"
}
