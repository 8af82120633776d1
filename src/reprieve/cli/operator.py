"""`reprieve operator`: runs the operator for Kubeflow Trainer; `reprieve operator crd` changes the TrainJob definition.

Serves the webhook that turns spec.checkpointing of a TrainJob, or its annotation reprieve.dev/checkpointing, into
environment, command and volumes; keeps spec.checkpointing in the resource definition of TrainJobs; and writes
status.trainingProgress of the jobs that ask for checkpoints. Runs in a pod, with the service account of
deploy/install.yaml. Needs pip install 'reprieve[operator]'.

`crd` does the latter once, with the credentials of your kubeconfig. An operator that runs puts back what --remove takes
out: stop it before. --check exits with 0 if everything is there, else with 1 and what is missing.

examples:
  reprieve operator --port 8443
  reprieve operator --cert-dir /certificates --progress proxy
  reprieve operator crd --install --context production
  reprieve operator crd --check --json
"""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser, Namespace
from pathlib import Path

from reprieve import exit_codes
from reprieve.cli.output import data, print_json, talk
from reprieve.errors import needing
from reprieve.units import parse_duration


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--port", type=int, default=8443, help="the port to serve HTTPS on (8443)")
    parser.add_argument("--namespace", default="", help="where the Service and the Secret are [the pod's]")
    parser.add_argument(
        "--service", metavar="NAME", default="reprieve-operator", help="the webhook's Service (reprieve-operator)"
    )
    parser.add_argument(
        "--webhook-configuration",
        metavar="NAME",
        default="reprieve-operator",
        help="the MutatingWebhookConfiguration whose caBundle is kept (reprieve-operator)",
    )
    parser.add_argument(
        "--certificate-life", metavar="DURATION", default="90d", help="of certificates that the operator makes (90d)"
    )
    parser.add_argument(
        "--cert-dir",
        metavar="PATH",
        type=Path,
        help="serve tls.crt and tls.key of this folder, as cert-manager writes them, instead of making certificates",
    )
    parser.add_argument(
        "--drain", metavar="DURATION", default="5s", help="how long to answer requests after SIGTERM (5s)"
    )
    parser.add_argument(
        "--progress",
        choices=("direct", "proxy", "off"),
        default="direct",
        help="how to get progress: from the pod of rank 0, else also through the API server, or not at all (direct)",
    )
    parser.add_argument(
        "--metrics-port",
        metavar="PORT",
        type=int,
        default=8080,
        help="the port to serve Prometheus metrics on, in plain HTTP; 0: none (8080)",
    )
    parts = parser.add_subparsers(dest="part", metavar="crd", title="without a part, the operator is run; else")
    crd = parts.add_parser(
        "crd", help="change or check the resource definition of TrainJobs", description=__doc__.splitlines()[0]
    )
    action = crd.add_mutually_exclusive_group(required=True)
    action.add_argument("--install", action="store_true", help="add spec.checkpointing and its columns")
    action.add_argument("--remove", action="store_true", help="make the definition equal to Trainer's own")
    action.add_argument("--check", action="store_true", help="report what is missing; exit 1 if something is")
    crd.add_argument("--context", metavar="NAME", help="of the kubeconfig [the current one]")
    crd.add_argument("--json", action="store_true", help="print JSON")


def main(args: Namespace) -> int:
    with needing("reprieve operator"):
        if args.part == "crd":
            return asyncio.run(_change_crd(args))
        return _run(args)


def _run(args: Namespace) -> int:
    from reprieve.operator.log import configure_logging
    from reprieve.operator.progress_keeper import ProgressMode
    from reprieve.operator.run import OperatorFailed, OperatorSettings, run_until_signal

    settings = OperatorSettings(
        port=args.port,
        namespace=args.namespace,
        service=args.service,
        webhook_configuration=args.webhook_configuration,
        certificate_life=parse_duration(args.certificate_life),
        certificate_folder=args.cert_dir,
        drain=parse_duration(args.drain),
        progress=ProgressMode(args.progress),
        metrics_port=args.metrics_port,
    )
    configure_logging()
    try:
        run_until_signal(settings)
    except OperatorFailed as error:
        talk.print(f"error: {error}")
        return exit_codes.NOT_FINISHED
    return 0


async def _change_crd(args: Namespace) -> int:
    from reprieve.kubernetes import crd_install
    from reprieve.kubernetes.api import KubernetesApi
    from reprieve.kubernetes.crd import CRD_NAME

    async with KubernetesApi(context=args.context, field_manager=crd_install.FIELD_MANAGER) as api:
        if args.check:
            missing = await crd_install.missing_parts(api)
            result = {"name": CRD_NAME, "installed": not missing, "missing": missing}
            lines = [f"missing: {path}" for path in missing] or [f"{CRD_NAME} has spec.checkpointing"]
        else:
            changed = await (crd_install.install(api) if args.install else crd_install.remove(api))
            result = {"name": CRD_NAME, "installed": bool(args.install), "changed": changed}
            state = "has spec.checkpointing" if args.install else "is Trainer's own"
            lines = [f"{CRD_NAME} {state}{'' if changed else ' already'}"]
    if args.json:
        print_json(result)
    else:
        for line in lines:
            data.print(line)
    return 0 if not args.check or result["installed"] else 1
