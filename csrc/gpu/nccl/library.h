// library.h: the NCCL functions that rollmesh calls. The library is loaded when the first group is
// created; rollmesh is built without NCCL. These declarations hold for NCCL 2.17 and later: NCCL
// only appends to its structs, and `version` tells it which fields the caller knows.
#pragma once

#include <limits.h>
#include <stddef.h>

#include "base/status.h"

enum { // ncclResult_t
  RM_NCCL_SUCCESS = 0,
  RM_NCCL_CUDA = 1,
  RM_NCCL_SYSTEM = 2,
  RM_NCCL_INTERNAL = 3,
  RM_NCCL_ARGUMENT = 4,
  RM_NCCL_USAGE = 5,
  RM_NCCL_REMOTE = 6,
  RM_NCCL_IN_PROGRESS = 7,
  RM_NCCL_TIMEOUT = 8,
};
enum { RM_NCCL_INT8 = 0, RM_NCCL_UNDEFINED = INT_MIN, RM_NCCL_ID_BYTES = 128 };
enum { RM_NCCL_LEAST = 21701 }; // the oldest supported version
#define RM_NCCL_MAGIC 0xcafebeefu

typedef struct rm_nccl_comm rm_nccl_comm; // ncclComm
typedef struct rm_nccl_id { // ncclUniqueId, passed by value
  char bytes[RM_NCCL_ID_BYTES];
} rm_nccl_id;

typedef struct rm_nccl_config { // ncclConfig_t of 2.17, with traffic_class in its trailing padding
  size_t size;
  unsigned magic, version;
  int blocking, cga_cluster_size, min_ctas, max_ctas;
  const char *net_name;
  int split_share, traffic_class;
} rm_nccl_config;
_Static_assert(sizeof(rm_nccl_config) == 48 && offsetof(rm_nccl_config, blocking) == 16 &&
                   offsetof(rm_nccl_config, net_name) == 32 &&
                   offsetof(rm_nccl_config, split_share) == 40,
               "the layout of ncclConfig_t");

// The functions: their member of rm_nccl, name without the prefix nccl, result, arguments. `stream`
// is rm_device.stream.
#define RM_NCCL_CALLS(X) \
  X(get_version, GetVersion, int, (int *version)) \
  X(get_unique_id, GetUniqueId, int, (rm_nccl_id * id)) \
  X(init_rank, CommInitRankConfig, int, \
    (rm_nccl_comm * *comm, int n_ranks, rm_nccl_id id, int rank, rm_nccl_config *config)) \
  X(get_async_error, CommGetAsyncError, int, (rm_nccl_comm * comm, int *result)) \
  X(abort, CommAbort, int, (rm_nccl_comm * comm)) \
  X(finalize, CommFinalize, int, (rm_nccl_comm * comm)) \
  X(destroy, CommDestroy, int, (rm_nccl_comm * comm)) \
  X(group_start, GroupStart, int, (void)) \
  X(group_end, GroupEnd, int, (void)) \
  X(send, Send, int, \
    (const void *from, size_t count, int type, int peer, rm_nccl_comm *comm, void *stream)) \
  X(recv, Recv, int, \
    (void *to, size_t count, int type, int peer, rm_nccl_comm *comm, void *stream)) \
  X(all_gather, AllGather, int, \
    (const void *from, void *to, size_t count, int type, rm_nccl_comm *comm, void *stream)) \
  X(error_string, GetErrorString, const char *, (int result)) \
  X(last_error, GetLastError, const char *, (rm_nccl_comm * comm))
#define RM_NCCL_MEMBER(member, name, result, arguments) result(*member) arguments;
typedef struct rm_nccl {
  int version; // 23203 is 2.32.3
  RM_NCCL_CALLS(RM_NCCL_MEMBER)
} rm_nccl;
#undef RM_NCCL_MEMBER

// Loads the library. It stays loaded, since its threads may outlive the last group. RM_E_CONFIG: no
// such file, not NCCL, or too old.
rm_code rm_nccl_load(const char *path, rm_nccl *out, rm_error *err);
