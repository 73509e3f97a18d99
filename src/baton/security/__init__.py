"""Identities of the processes of a deployment, and what each may do. docs/security.md is the page.

    names         the content of a certificate: topic, role and worker id, as a SPIFFE id
    access        the table of roles and methods
    interceptors  that table, enforced in each gRPC server
    identity      one process's key and certificate, in a folder
    authority     the CA: issues certificates
    tokens        invitations to join, which the CA hands out
    revocations   certificates that the CA no longer renews
    joining       a process without a certificate asks the CA for one, or for its next one
    join_service  the CA's end of that
    renewal       the thread that renews in time
    exposure      who may listen in plain text
    sealing       bulk data between two processes that agreed on keys

`baton.rpc` uses it where servers and channels are made. All keys, certificates and signatures are the work of
`cryptography`.
"""
