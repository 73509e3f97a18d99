"""A container's health check: exit with status 0 when the gRPC server at HOST:PORT is serving.

A second argument names one of its services. With security.tls the check uses the server's own certificate,
in BATON_SECURITY__FOLDER.
"""

import os
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton import rpc
from baton.security.errors import IdentityError
from baton.security.names import Role

TIMEOUT_S = 2.0


def main() -> int:
    if len(sys.argv) not in (2, 3):
        print("usage: healthcheck.py HOST:PORT [SERVICE]", file=sys.stderr)
        return 2
    role = Role.WORKER
    if folder := os.environ.get("BATON_SECURITY__FOLDER"):
        from baton.security.identity import Identity

        try:
            mine = Identity(Path(folder).expanduser())
        except IdentityError as error:
            print(error, file=sys.stderr)
            return 1
        rpc.act_as(mine)
        role = mine.name.role
    with rpc.Dialler(role).channel(sys.argv[1]) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service="".join(sys.argv[2:])), timeout=TIMEOUT_S
            )
        except grpc.RpcError as error:
            print(f"{sys.argv[1]}: {error.code().name}", file=sys.stderr)
            return 1
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1


if __name__ == "__main__":
    sys.exit(main())
