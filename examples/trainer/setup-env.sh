#!/usr/bin/env bash
# Creates or updates the Secret hf-secrets with the HF_TOKEN of .env. Options are kubectl's: ./setup-env.sh -n my-namespace
#
# The token is in no argument list, which every user of this machine could read, and in no shell history: it goes from
# the file through a pipe. Server-side apply keeps no copy of it in an annotation.
set +x -euo pipefail

readonly secret=hf-secrets
folder="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
readonly folder file="$folder/.env"

fail() {
    echo "setup-env.sh: $1" >&2
    exit 1
}

# A relative path in KUBECONFIG is meant from examples/, where the other commands run.
if [[ -n ${KUBECONFIG:-} ]]; then
    IFS=: read -r -a entries <<< "$KUBECONFIG"
    for i in "${!entries[@]}"; do
        entry="${entries[i]}"
        [[ -z $entry || -e $entry || ! -e $folder/../$entry ]] || entries[i]="$folder/../$entry"
    done
    KUBECONFIG="$(IFS=: && printf '%s' "${entries[*]}")"
fi

command -v kubectl > /dev/null || fail "kubectl is missing: https://kubernetes.io/docs/tasks/tools/"
[[ -f $file ]] || fail "$file is missing: cp $folder/.env.example $file, and put your Hugging Face token into it"
chmod go-rwx "$file"

token=""
while IFS= read -r line || [[ -n $line ]]; do
    line="${line%$'\r'}"
    [[ $line =~ ^[[:space:]]*(export[[:space:]]+)?HF_TOKEN[[:space:]]*=[[:space:]]*(.*)$ ]] || continue
    token="${BASH_REMATCH[2]}"
    token="${token%"${token##*[![:space:]]}"}"
    [[ $token =~ ^\"(.*)\"$ || $token =~ ^\'(.*)\'$ ]] && token="${BASH_REMATCH[1]}"
done < "$file"
[[ -n $token ]] || fail "$file has no HF_TOKEN: write a line HF_TOKEN=hf_…"
[[ $token != *[[:space:]]* ]] || fail "the HF_TOKEN in $file contains a space: a token has none"

printf '%s' "$token" \
    | kubectl create secret generic "$secret" --from-file=HF_TOKEN=/dev/stdin --dry-run=client --output=yaml "$@" \
    | kubectl apply --server-side --force-conflicts --field-manager=setup-env --filename=- "$@"
