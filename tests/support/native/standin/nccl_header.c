// nccl_header.c: compares csrc/gpu/nccl/library.h with NCCL's own nccl.h by compiling with both:
// values, layouts, and each function's type. It is compiled, never run.
#include <nccl.h>

#include "gpu/nccl/library.h"

#define SAME(a, b) _Static_assert((int)(a) == (int)(b), #a " is not " #b)
#define SAME_PLACE(ours, theirs) \
  _Static_assert(offsetof(rm_nccl_config, ours) == offsetof(ncclConfig_t, theirs) && \
                     sizeof(((rm_nccl_config *)0)->ours) == sizeof(((ncclConfig_t *)0)->theirs), \
                 #ours " does not lie where " #theirs " does")

SAME(RM_NCCL_SUCCESS, ncclSuccess);
SAME(RM_NCCL_CUDA, ncclUnhandledCudaError);
SAME(RM_NCCL_SYSTEM, ncclSystemError);
SAME(RM_NCCL_INTERNAL, ncclInternalError);
SAME(RM_NCCL_ARGUMENT, ncclInvalidArgument);
SAME(RM_NCCL_USAGE, ncclInvalidUsage);
SAME(RM_NCCL_REMOTE, ncclRemoteError);
SAME(RM_NCCL_IN_PROGRESS, ncclInProgress);
SAME(RM_NCCL_TIMEOUT, 8); // ncclTimeout, which is younger than the rest
SAME(RM_NCCL_INT8, ncclInt8);
SAME(RM_NCCL_UNDEFINED, NCCL_CONFIG_UNDEF_INT);
SAME(RM_NCCL_MAGIC, NCCL_API_MAGIC);
SAME(RM_NCCL_ID_BYTES, NCCL_UNIQUE_ID_BYTES);
SAME(sizeof(rm_nccl_id), sizeof(ncclUniqueId));
SAME(RM_NCCL_LEAST, NCCL_VERSION(2, 17, 1));
_Static_assert(sizeof(rm_nccl_config) <= sizeof(ncclConfig_t), "NCCL reads no more than there is");
SAME_PLACE(size, size);
SAME_PLACE(magic, magic);
SAME_PLACE(version, version);
SAME_PLACE(blocking, blocking);
SAME_PLACE(cga_cluster_size, cgaClusterSize);
SAME_PLACE(min_ctas, minCTAs);
SAME_PLACE(max_ctas, maxCTAs);
SAME_PLACE(net_name, netName);
SAME_PLACE(split_share, splitShare);
SAME_PLACE(traffic_class, trafficClass);

// The same number of arguments of types that are passed alike: pointers stand for handles, int for
// enumerations.
#define TAKES(theirs, result, ...) \
  _Static_assert(_Generic(&theirs, result (*)(__VA_ARGS__): 1, default: 0), \
                 #theirs " is of another type")
TAKES(ncclGetVersion, ncclResult_t, int *);
TAKES(ncclGetUniqueId, ncclResult_t, ncclUniqueId *);
TAKES(ncclCommInitRankConfig, ncclResult_t, ncclComm_t *, int, ncclUniqueId, int, ncclConfig_t *);
TAKES(ncclCommGetAsyncError, ncclResult_t, ncclComm_t, ncclResult_t *);
TAKES(ncclCommAbort, ncclResult_t, ncclComm_t);
TAKES(ncclCommFinalize, ncclResult_t, ncclComm_t);
TAKES(ncclCommDestroy, ncclResult_t, ncclComm_t);
TAKES(ncclSend, ncclResult_t, const void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);
TAKES(ncclRecv, ncclResult_t, void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);
TAKES(ncclAllGather, ncclResult_t, const void *, void *, size_t, ncclDataType_t, ncclComm_t,
      cudaStream_t);
TAKES(ncclGetErrorString, const char *, ncclResult_t);
TAKES(ncclGetLastError, const char *, ncclComm_t);
