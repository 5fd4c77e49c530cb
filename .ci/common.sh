# Shared by the scripts of this folder, which source it first: strict mode, the repository as the
# current folder, a scratch folder that is removed at the end.
set -euo pipefail
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

# Ends the script, successfully, when one of the tools is not on this machine.
need() {
    local tool
    for tool in "$@"; do
        if ! command -v "$tool" >/dev/null; then
            printf '%s: skipped: %s is absent\n' "${0##*/}" "$tool"
            exit 0
        fi
    done
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
