"""Weights: how a new version reaches the engine of a generator, and which version serves.

The protocol of one sync. `Generator.sync_weights`, `Generator.begin_sync` and vLLM's workers
(rollmesh/vllm/weight_updates.py) follow it; updates.py makes the calls in this order.

1. Begin. The version number must exceed the last committed one; None is the next number. The
   engine opens a second copy of the weights, the staged copy (mode="staged"; the first two syncs
   allocate one copy each), or takes the serving copy out of service (mode="inplace", which waits
   for running requests first). One sync is open at a time: a new one drops an open one.
2. Resolve. Each name of the source is resolved once (csrc/weights/names.c) to an entry of the
   plan (plan.py): the parameters that it fills, their rows, and the order of these rows. Names of
   rope's buffers, and with strict=False unknown names, become entries that are skipped.
3. Check. Each tensor is taken once, without a copy (DLPack, NumPy), and compared with its entry:
   shape, dtype (cast=True converts), strides, device. A mapping is checked as a whole before a
   byte is copied, and one error lists all faults of a kind; an iterator is checked entry by
   entry. Sources that do not hold all tensors at once are read again for the copy.
4. Copy. Threads copy the entries into the staged copy in the kernels' layout. The same pass
   computes digests and finds values that are not finite, and differences between tied matrices. A
   list of entries is copied as a whole or undone.
5. Commit. With inflight="wait" running requests finish first. The engine checks that every
   required parameter was copied and swaps the copies: the new version serves. Then it applies
   another `inflight` to running requests and drops the prefix cache.
6. Undo. An error at any point drops the staged copy, and the old version keeps serving. Only a
   sync in place that has begun to write leaves the generator without weights (NotSyncedError)
   until the next sync.

Ranks. Ranks that are threads of one process get each list of entries together: what one rank
refuses is undone on all. Ranks that are processes all make the same calls and exchange messages
at the beginning, at each push of begin_sync and at the end. If one of them fails, the sync ends
on all: it raises its own error, the others SyncAbortedError with its number and reason. A tensor
that every rank refuses leaves a begin_sync open. Pieces of a sharded trainer are sent to the
ranks that need them (resharding.py). The commit has two phases: every rank prepares, all vote and
compare digests of shards that they share, and then all swap or none
(csrc/weights/two_phase_commit.h). When ranks hold different values, all raise MeshMismatchError.

Errors. Typed (rollmesh/errors.py). A name: UnexpectedKeyError, DuplicateKeyError,
MissingKeyError, LimitError. A tensor: ShapeError, DTypeError, LayoutError,
UnsupportedTensorError, NonFiniteError, TiedWeightError. The set: IncompleteSyncError,
VersionError, CapacityError, DeadlineError, StateError. Exceptions of the source pass through.

Who may call. Any thread of the process that made the generator. `Weights` trusts its caller to hold
the engine; `Sync`, the handle that begin_sync returns, takes the engine for each call. A sync has
the engine to itself. Steps may run between the pushes of begin_sync and, in one process, between
the checks and copies into the staged copy (Plan._maybe_step, Loan.let_step). They use the old
version.

    updates               Weights: begin, push, commit, abort, sleep and wake; Sync
    plan                  Plan: entries of names, and their check and copy
    sync                  options and report
    pieces                Piece, and the local part of a DTensor
    resharding            from the pieces of a trainer's ranks to the shards of the generator's
    reshard_plan          the copies between ranks of one tensor
    self_test             compares logprobs of trainer and generator
    transport             tensors between processes: shared memory, CUDA IPC loans, deltas
    safetensors_folder    a checkpoint as a mapping

This file imports nothing: the modules above import each other through parts of the package below.
"""
