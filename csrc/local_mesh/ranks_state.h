// ranks_state.h: the struct of the ranks of a process, for the files of this folder. Calls that
// take time or communicate run on all ranks in parallel (rm_ranks_run); the others run on one
// engine after the other.
#pragma once

#include "device/ready_streams.h"
#include "local_mesh/groups.h"
#include "local_mesh/ranks.h"

enum { N_GROUPS = RM_GROUP_WORLD + 1 }; // of the model
enum { PREFIX_SLOTS = 4096 }; // prefixes of prompts, for routing

typedef struct rm_member { // one rank
  rm_device device; // owned, as all that follows; zeros on the CPU
  rm_engine *engine;
  rm_comm *groups[N_GROUPS];
  rm_code code; // of the job at hand
  rm_error err;
  int64_t n_work; // of its last step
  rm_sync_report report; // of its last commit
} rm_member;

typedef struct rm_prefix {
  uint64_t hash;
  int32_t replica;
} rm_prefix;

struct rm_ranks {
  // ranks.c, set at creation
  rm_mesh mesh;
  int first, n; // ranks in this process: all, or one
  int n_replicas, per_replica; // of those: whole replicas, or one rank of one
  int own; // the replica of members[0]
  rm_team *team; // owned, a thread for each member; NULL where there is one
  rm_region *region; // owned
  rm_member *members; // [n]
  rm_ready_streams ready_streams; // owned
  int64_t page_size;
  int has_external_scheduler; // it chooses the replica
  // ranks_requests.c; owned
  int64_t *assigned; // [dp] tokens assigned to each replica so far
  rm_prefix *prefixes; // [PREFIX_SLOTS]
  uint64_t next_id;
};

// A call on one member, whose error it leaves in the member. rm_ranks_run calls it on all members
// in parallel, each on its thread, and returns one member's error; the members' codes stay until
// the next job.
typedef rm_code (*rm_member_call)(rm_member *member, void *arg);
rm_code rm_ranks_run(rm_ranks *ranks, rm_member_call call, void *arg, rm_error *err);
