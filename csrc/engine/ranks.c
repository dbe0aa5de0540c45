// ranks.c: see ranks.h. Every call that may take time or talk to other ranks is a job that runs on all of them; the rest is done one
// engine after the other. Replicas are told apart by asking who has a request: ids are unique in the process.
#include "engine/ranks.h"

#include <string.h>

#include "base/cuda.h"
#include "base/memory.h"
#include "base/readers.h"
#include "mesh/region.h"

enum { GROUP_TP, GROUP_EP, GROUP_WORLD, N_GROUPS };
enum {
  BUFFER_BYTES = 1 << 20,
  PREFIX_SLOTS = 4096,          // remembered beginnings of prompts
  AHEAD = 4,                    // requests' worth of work that a replica may be ahead of the least busy one for a prefix
};

typedef struct rm_member {      // one rank
  rm_device device;             // owned, as all that follows; zeros on the CPU
  rm_engine *engine;
  rm_comm *groups[N_GROUPS];
  rm_code code;                 // of the job at hand
  rm_error err;
  int64_t n_work;
  rm_sync_report report;
} rm_member;

typedef struct rm_beginning {
  uint64_t hash;
  int32_t replica;
} rm_beginning;

struct rm_ranks {
  rm_mesh mesh;
  int first, n;                 // ranks in this process: all, or one
  int n_replicas, per_replica;  // of those: whole replicas, or one rank of one
  int own;                      // the replica of members[0]
  rm_team *team;                // owned, a thread for each member; NULL where there is one
  rm_region *region;            // owned
  rm_member *members;           // [n]
  rm_readers readers;           // owned
  int64_t *asked;               // [dp] tokens asked of each replica so far
  rm_beginning *beginnings;     // [PREFIX_SLOTS]
  int64_t page_size;
  int hosted;
  uint64_t next_id;
};

// ---------------------------------------------------------------------------------------------- jobs
typedef rm_code (*member_call)(rm_member *member, void *arg);

typedef struct member_job {
  rm_ranks *ranks;
  member_call call;
  void *arg;
} member_job;

static void member_task(void *arg, int thread, int n_threads) {
  const member_job *job = arg;
  for (int r = thread; r < job->ranks->n; r += n_threads) {
    rm_member *member = &job->ranks->members[r];
    member->code = job->call(member, job->arg);
  }
}

static int hearsay(rm_code code) { return code == RM_E_RANK_LOST || code == RM_E_SYNC_ABORTED; }

// All have lost a rank: what the first says, which may be that another has given up, and what that one says for itself.
static void tell_both(const rm_ranks *ranks, const rm_member *first, rm_error *err) {
  const char *text = rm_error_message(&first->err);
  const rm_member *other = NULL;
  for (int r = 0; r < ranks->n && !other; r++)
    if (ranks->members[r].code == first->code && strcmp(rm_error_message(&ranks->members[r].err), text)) other = &ranks->members[r];
  if (!other) rm_fail(err, first->code, "%s", text);
  else
    rm_fail(err, first->code, "rank %d: %.300s; rank %d: %.300s", (int)(first - ranks->members), text, (int)(other - ranks->members),
            rm_error_message(&other->err));
}

// The error worth telling, moved to err; the others are forgotten.
static rm_code verdict(rm_ranks *ranks, rm_error *err) {
  rm_member *worst = NULL;
  for (int r = 0; r < ranks->n; r++) {
    rm_member *member = &ranks->members[r];
    if (member->code && (!worst || (hearsay(worst->code) && !hearsay(member->code)))) worst = member;
  }
  const rm_code code = worst ? worst->code : RM_OK;
  if (code == RM_E_RANK_LOST) tell_both(ranks, worst, err);
  else if (worst) rm_fail(err, code, "%s", rm_error_message(&worst->err));
  for (int r = 0; r < ranks->n; r++) rm_error_clear(&ranks->members[r].err);
  return code;
}

static rm_code on_all(rm_ranks *ranks, member_call call, void *arg, rm_error *err) {
  member_job job = {ranks, call, arg};
  if (ranks->team) rm_team_run(ranks->team, member_task, &job);
  else member_task(&job, 0, 1);
  return verdict(ranks, err);
}

// ---------------------------------------------------------------------------------------------- life
static rm_code create_groups(rm_ranks *ranks, int r, rm_error *err) {
  static const rm_axis axes[] = {RM_AXIS_TP, RM_AXIS_EP};
  rm_member *member = &ranks->members[r];
  int32_t ids[RM_MAX_WORLD];
  rm_code code = RM_OK;
  for (int group = 0; group < N_GROUPS && !code; group++) {
    const rm_peers peers = group == GROUP_WORLD ? (rm_peers){0, 1, ranks->n} : rm_mesh_peers(&ranks->mesh, r, axes[group]);
    for (int32_t i = 0; i < peers.count; i++) ids[i] = peers.first + i * peers.step;
    if (peers.count > 1) code = rm_region_comm(ranks->region, group, ids, peers.count, r, &member->groups[group], err);
  }
  return code;
}

typedef struct creation {
  const rm_ranks *ranks;
  const rm_spec *spec;
  const rm_ranks_options *options;
} creation;

static rm_code open_device(rm_member *member, const rm_ranks_options *options, int rank) {
  int ordinal = options->cuda_ordinal, count = 0;
  if (!options->cuda_library) return RM_OK;
  if (ordinal < 0) {
    const rm_code code = rm_cuda_count(options->cuda_library, &count, &member->err);
    if (code) return code;
    ordinal = count > 0 ? rank % count : 0;
  }
  return rm_cuda_device(options->cuda_library, ordinal, options->cuda_family, &member->device, &member->err);
}

static rm_code make_engine(rm_member *member, const creation *how) {
  const rm_ranks *ranks = how->ranks;
  rm_engine_options options = how->options->engine;
  char card[32] = "";
  rm_code code = open_device(member, how->options, ranks->first + (int)(member - ranks->members));
  if (!code && member->device.self) code = rm_cuda_bus_id(how->options->cuda_library, member->device.ordinal, card, &member->err);
  if (code) return code;
  if (member->device.self) options.device = &member->device;
  options.memory = rm_memory_name(card);
  options.rank = (rm_rank){
      .mesh = ranks->mesh,
      .index = ranks->first + (int32_t)(member - ranks->members),
      .tp = member->groups[GROUP_TP],
      .ep = member->groups[GROUP_EP],
      .world = member->groups[GROUP_WORLD],
      .dispatcher = how->options->dispatcher,
      .sequence_parallel = how->options->sequence_parallel,
  };
  if (ranks->n > 1) options.n_threads = options.n_threads > ranks->n ? options.n_threads / ranks->n : 1;
  return rm_engine_create(how->spec, &options, &member->engine, &member->err);
}

// The others may wait for this rank while they make theirs.
static rm_code create_engine(rm_member *member, void *arg) {
  const rm_code code = make_engine(member, arg);
  for (int group = 0; group < N_GROUPS && code; group++)
    if (member->groups[group]) rm_comm_abort(member->groups[group], code);
  return code;
}

// Together: ranks leave a group of NCCL when all have come to it.
static rm_code destroy_engine(rm_member *member, void *arg) {
  (void)arg;
  rm_engine_destroy(member->engine);
  member->engine = NULL;
  return RM_OK;
}

static rm_code connect(rm_ranks *ranks, rm_error *err) {
  const rm_region_options region = {.world = ranks->n, .n_groups = N_GROUPS, .buffer_bytes = BUFFER_BYTES, .timeout = 600};
  rm_code code;
  if ((code = rm_team_create(ranks->n, &ranks->team, err))) return code;
  if ((code = rm_region_create(&region, &ranks->region, err))) return code;
  for (int r = 0; r < ranks->n; r++)
    if ((code = create_groups(ranks, r, err))) return code;
  return RM_OK;
}

// In one process the ranks' GPUs may be of several architectures, and bits one's own. Between processes the families are compared when
// they meet.
static rm_code check_families(const rm_ranks *ranks, rm_error *err) {
  const rm_member *first = &ranks->members[0];
  for (int r = 1; r < ranks->n && first->device.self; r++) {
    const rm_device *device = &ranks->members[r].device;
    if (strcmp(device->kernels->family, first->device.kernels->family) != 0)
      return rm_fail(err, RM_E_MESH_MISMATCH, "rank %d has family = %s on %s, rank 0 %s on %s", r, device->kernels->family, device->name,
                     first->device.kernels->family, first->device.name);
  }
  return RM_OK;
}

static rm_code create_parts(rm_ranks *ranks, const rm_spec *spec, const rm_ranks_options *options, rm_error *err) {
  creation how = {ranks, spec, options};
  ranks->members = rm_alloc((size_t)ranks->n, sizeof *ranks->members);
  ranks->asked = rm_alloc((size_t)ranks->mesh.dp, sizeof *ranks->asked);
  ranks->beginnings = rm_alloc(PREFIX_SLOTS, sizeof *ranks->beginnings);
  if (!ranks->members || !ranks->asked || !ranks->beginnings) return rm_fail(err, RM_E_MEMORY, "no memory for %d ranks", ranks->n);
  if (options->ends) {
    rm_comm *const groups[N_GROUPS] = {options->ends->tp, options->ends->ep, options->ends->world};
    memcpy(ranks->members[0].groups, groups, sizeof groups);
  } else if (ranks->n > 1) {
    const rm_code code = connect(ranks, err);
    if (code) return code;
  }
  rm_code code = rm_readers_init(&ranks->readers, options->cuda_library, err);
  if (!code) code = on_all(ranks, create_engine, &how, err);
  if (!code) code = check_families(ranks, err);
  for (int r = ranks->n - 1; r >= 0 && !code; r--) {
    const rm_device *device = &ranks->members[r].device;
    if (device->self && device->ordinal < RM_MAX_GPUS) ranks->readers.own[device->ordinal] = device;
  }
  return code;
}

rm_code rm_ranks_create(const rm_spec *spec, const rm_ranks_options *options, rm_ranks **out, rm_error *err) {
  const int world = rm_mesh_world(&options->mesh);
  *out = NULL;
  rm_code code = rm_placement_check(spec, &options->mesh, err);
  if (code) return code;
  if (options->ends && (options->ends->index < 0 || options->ends->index >= world))
    return rm_fail(err, RM_E_CONFIG, "rank %d is not in a world of %d", options->ends->index, world);
  if (options->engine.host_pages > 0 && !options->ends && world > 1)
    return rm_fail(err, RM_E_CONFIG, "a mesh of %d ranks in a process that a host schedules, wanted one rank a process", world);
  rm_ranks *ranks = rm_alloc(1, sizeof *ranks);
  if (!ranks) return rm_fail(err, RM_E_MEMORY, "no memory for the ranks");
  ranks->mesh = options->mesh;
  ranks->n = options->ends ? 1 : world;
  ranks->first = options->ends ? options->ends->index : 0;
  ranks->n_replicas = options->ends ? 1 : ranks->mesh.dp;
  ranks->per_replica = options->ends ? 1 : ranks->mesh.tp;
  ranks->own = rm_mesh_coords(&ranks->mesh, ranks->first).dp;
  ranks->page_size = options->engine.page_size;
  ranks->hosted = options->engine.host_pages > 0;
  ranks->next_id = 1;
  code = create_parts(ranks, spec, options, err);
  if (code) {
    if (options->ends && ranks->members) memset(ranks->members[0].groups, 0, sizeof ranks->members[0].groups);   // the caller's still
    rm_ranks_destroy(ranks);
    return code;
  }
  *out = ranks;
  return RM_OK;
}

void rm_ranks_destroy(rm_ranks *ranks) {
  if (!ranks) return;
  if (ranks->members) on_all(ranks, destroy_engine, NULL, NULL);
  rm_readers_destroy(&ranks->readers);
  for (int r = 0; ranks->members && r < ranks->n; r++) {
    if (ranks->members[r].device.self) ranks->members[r].device.close(ranks->members[r].device.self);
    for (int group = 0; group < N_GROUPS; group++) rm_comm_destroy(ranks->members[r].groups[group]);
    rm_error_clear(&ranks->members[r].err);
  }
  rm_region_release(ranks->region);
  rm_team_destroy(ranks->team);
  rm_free(ranks->members);
  rm_free(ranks->asked);
  rm_free(ranks->beginnings);
  rm_free(ranks);
}

void rm_ranks_give_up(rm_ranks *ranks) {
  for (int r = 0; r < ranks->n; r++)
    for (int group = 0; group < N_GROUPS; group++)
      if (ranks->members[r].groups[group]) rm_comm_abort(ranks->members[r].groups[group], RM_E_RANK_LOST);
}

rm_mesh rm_ranks_mesh(const rm_ranks *ranks) { return ranks->mesh; }
rm_engine *rm_ranks_engine(rm_ranks *ranks, int member) { return ranks->members[member].engine; }
int rm_ranks_read_gpus(const rm_ranks *ranks) { return ranks->readers.library != NULL; }
rm_code rm_ranks_reader(rm_ranks *ranks, int ordinal, const rm_device **out, rm_error *err) {
  return rm_readers_find(&ranks->readers, ordinal, out, err);
}

// ---------------------------------------------------------------------------------------------- replicas
// Replicas are counted here among those of this process; `i` among the replica's ranks of this process, which are all alike.
static rm_engine *engine_of(const rm_ranks *ranks, int replica, int i) { return ranks->members[replica * ranks->per_replica + i].engine; }
static rm_engine *leader(const rm_ranks *ranks, int replica) { return engine_of(ranks, replica, 0); }

static uint64_t hash_beginning(const rm_request *request, int64_t n) {
  uint64_t hash = 0xCBF29CE484222325u;
  for (int64_t i = 0; i < n; i++) hash = (hash ^ (uint64_t)(uint32_t)request->prompt[i]) * 0x9E3779B97F4A7C15u;
  return hash ? hash : 1;
}

static int64_t work_of(const rm_request *request) {
  const int64_t per_sample = request->kind == RM_GENERATE ? rm_min64(rm_max64(request->max_tokens, 0), 1 << 20) : 0;
  return request->n_prompt + per_sample * (request->kind == RM_GENERATE ? request->n : 1);
}

// Of a request that was checked. *place: where its beginning is remembered, NULL: it is too short.
static int choose_replica(rm_ranks *ranks, const rm_request *request, rm_beginning **place) {
  int least = 0;
  *place = NULL;
  for (int d = 1; d < ranks->mesh.dp; d++)
    if (ranks->asked[d] < ranks->asked[least]) least = d;
  if (ranks->hosted) return ranks->own;
  if (ranks->mesh.dp == 1 || request->n_prompt < ranks->page_size) return least;
  const uint64_t hash = hash_beginning(request, ranks->page_size);
  *place = &ranks->beginnings[hash % PREFIX_SLOTS];
  const int before = (*place)->hash == hash ? (*place)->replica : least;
  return ranks->asked[before] - ranks->asked[least] <= AHEAD * work_of(request) ? before : least;
}

int rm_ranks_has(const rm_ranks *ranks, uint64_t id) {
  int has = 0;
  for (int d = 0; d < ranks->n_replicas && !has; d++) has = rm_engine_has(leader(ranks, d), id);
  return has;
}

// Who has the request; replica 0 says that nobody does.
static int replica_of(const rm_ranks *ranks, uint64_t id) {
  int d = ranks->n_replicas - 1;
  while (d > 0 && !rm_engine_has(leader(ranks, d), id)) d--;
  return d;
}

// The same for every rank of the replica; the first's answer, since all are alike.
typedef rm_code (*id_call)(rm_engine *, uint64_t, rm_error *);
static rm_code on_replica(rm_ranks *ranks, uint64_t id, id_call call, rm_error *err) {
  const int replica = replica_of(ranks, id);
  const rm_code code = call(leader(ranks, replica), id, err);
  for (int i = 1; i < ranks->per_replica && !code; i++) call(engine_of(ranks, replica, i), id, NULL);
  return code;
}

// ---------------------------------------------------------------------------------------------- requests
// On all ranks of a replica here, or on none.
static rm_code add_to(rm_ranks *ranks, int replica, const rm_request *request, uint64_t *id, rm_error *err) {
  rm_request mine = *request;
  mine.wants_logits = request->wants_logits || request->logits_out;
  for (int i = 0; i < ranks->per_replica; i++) {
    const rm_code code = rm_engine_add(engine_of(ranks, replica, i), &mine, id, err);
    while (code && i-- > 0) {   // no memory for it on a later rank
      rm_engine_abort(engine_of(ranks, replica, i), mine.id, NULL);
      rm_engine_release(engine_of(ranks, replica, i), mine.id, NULL);
    }
    if (code) return code;
    mine.logits_out = NULL;
  }
  return RM_OK;
}

rm_code rm_ranks_add(rm_ranks *ranks, const rm_request *request, uint64_t *id, rm_error *err) {
  rm_request mine = *request;
  rm_beginning *place;
  mine.id = *id = ranks->next_id;
  rm_code code = ranks->mesh.dp > 1 ? rm_engine_check(leader(ranks, 0), &mine, err) : RM_OK;   // the same verdict on every rank
  if (code) return code;
  const int chosen = choose_replica(ranks, &mine, &place), replica = chosen - ranks->own;   // own is 0 where all are here
  if (replica >= 0 && replica < ranks->n_replicas && (code = add_to(ranks, replica, &mine, id, err))) return code;
  if (place) *place = (rm_beginning){hash_beginning(&mine, ranks->page_size), chosen};
  ranks->asked[chosen] += work_of(&mine);
  ranks->next_id++;
  return RM_OK;
}

static rm_code step_member(rm_member *member, void *arg) {
  (void)arg;
  return rm_engine_step(member->engine, &member->n_work, &member->err);
}

rm_code rm_ranks_step(rm_ranks *ranks, int64_t *n_work, int *more, rm_error *err) {
  *n_work = *more = 0;
  for (int r = 0; r < ranks->n; r++)   // one that went another way would be waited for until the deadline
    if (rm_engine_unfinished(ranks->members[r].engine) != rm_engine_unfinished(leader(ranks, r / ranks->per_replica)))
      return rm_fail(err, RM_E_COLLECTIVE_MISMATCH, "rank %d has %lld requests and the first of its replica %lld", ranks->first + r,
                     (long long)rm_engine_unfinished(ranks->members[r].engine),
                     (long long)rm_engine_unfinished(leader(ranks, r / ranks->per_replica)));
  const rm_code code = on_all(ranks, step_member, NULL, err);
  for (int d = 0; d < ranks->n_replicas; d++) {
    *n_work += ranks->members[d * ranks->per_replica].n_work;
    *more |= rm_engine_had_work(leader(ranks, d));
  }
  return code;
}

int64_t rm_ranks_unfinished(const rm_ranks *ranks) {
  int64_t n = 0;
  for (int d = 0; d < ranks->n_replicas; d++) n += rm_engine_unfinished(leader(ranks, d));
  return n;
}

uint64_t rm_ranks_next_finished(const rm_ranks *ranks) {
  uint64_t id = 0;
  for (int d = 0; d < ranks->n_replicas && !id; d++) id = rm_engine_next_finished(leader(ranks, d));
  return id;
}

int64_t rm_ranks_finished(rm_ranks *ranks, uint64_t *ids, int64_t capacity) {
  int64_t n = 0;
  for (int d = 0; d < ranks->n_replicas; d++) {
    const int64_t got = rm_engine_finished(leader(ranks, d), ids + n, capacity - n);
    for (int t = 1; t < ranks->per_replica; t++) {
      uint64_t same;   // the other ranks of the replica finish the same requests in the same order
      for (int64_t i = 0; i < got; i++) rm_engine_finished(engine_of(ranks, d, t), &same, 1);
    }
    n += got;
  }
  return n;
}

rm_code rm_ranks_view(const rm_ranks *ranks, uint64_t id, rm_request_view *out, rm_error *err) {
  return rm_engine_view(leader(ranks, replica_of(ranks, id)), id, out, err);
}

rm_code rm_ranks_sample_view(const rm_ranks *ranks, uint64_t id, int32_t sample, rm_sample_view *out, rm_error *err) {
  return rm_engine_sample_view(leader(ranks, replica_of(ranks, id)), id, sample, out, err);
}

rm_code rm_ranks_release(rm_ranks *ranks, uint64_t id, rm_error *err) { return on_replica(ranks, id, rm_engine_release, err); }
rm_code rm_ranks_abort(rm_ranks *ranks, uint64_t id, rm_error *err) { return on_replica(ranks, id, rm_engine_abort, err); }

rm_code rm_ranks_stop_sample(rm_ranks *ranks, uint64_t id, int32_t sample, int64_t n_tokens, rm_error *err) {
  const int replica = replica_of(ranks, id);
  rm_code code = RM_OK;
  for (int t = 0; t < ranks->per_replica && !code; t++)
    code = rm_engine_stop_sample(engine_of(ranks, replica, t), id, sample, n_tokens, err);
  return code;
}

void rm_ranks_pause(rm_ranks *ranks, int paused) {
  for (int r = 0; r < ranks->n; r++) rm_engine_pause(ranks->members[r].engine, paused);
}

void rm_ranks_reset_prefix_cache(rm_ranks *ranks) {
  for (int r = 0; r < ranks->n; r++) rm_engine_reset_prefix_cache(ranks->members[r].engine);
}

// ---------------------------------------------------------------------------------------------- a host's
rm_code rm_ranks_host_step(rm_ranks *ranks, const rm_host_step *step, rm_host_result *results, int64_t *n_work, rm_error *err) {
  return rm_engine_host_step(ranks->members[0].engine, step, results, n_work, err);
}

rm_code rm_ranks_host_draw(rm_ranks *ranks, const rm_host_draw *draws, int64_t n, rm_host_result *results, rm_error *err) {
  return rm_engine_host_draw(ranks->members[0].engine, draws, n, results, err);
}

void rm_ranks_host_forget(rm_ranks *ranks, const int32_t *pages, int64_t n) { rm_engine_host_forget(ranks->members[0].engine, pages, n); }

rm_code rm_ranks_host_fail(rm_ranks *ranks, uint64_t id, rm_error *err) { return rm_engine_host_fail(ranks->members[0].engine, id, err); }

rm_code rm_ranks_host_preempt(rm_ranks *ranks, uint64_t id, rm_error *err) {
  return rm_engine_host_preempt(ranks->members[0].engine, id, err);
}

rm_code rm_ranks_host_tokens(rm_ranks *ranks, uint64_t id, const int32_t *tokens, int64_t n, rm_error *err) {
  return rm_engine_host_tokens(ranks->members[0].engine, id, tokens, n, err);
}

// ---------------------------------------------------------------------------------------------- weights
static rm_code begin_member(rm_member *member, void *arg) { return rm_engine_sync_begin(member->engine, arg, &member->err); }

rm_code rm_ranks_sync_begin(rm_ranks *ranks, const rm_sync_options *options, rm_error *err) {
  rm_sync_options same = *options;
  const rm_code code = on_all(ranks, begin_member, &same, err);
  if (code && ranks->n > 1) rm_ranks_sync_abort(ranks);
  return code;
}

rm_code rm_ranks_sync_check(rm_ranks *ranks, const char *name, size_t length, const rm_tensor *tensor, rm_error *err) {
  return rm_engine_sync_check(ranks->members[0].engine, name, length, tensor, err);   // nothing that it asks depends on the part
}

typedef struct pushed {
  const rm_entry *entries;
  int64_t n;
} pushed;

static rm_code push_member(rm_member *member, void *arg) {
  const pushed *it = arg;
  return rm_engine_sync_push_all(member->engine, it->entries, it->n, &member->err);
}

// Producers of tensors on a GPU have made a stream of that GPU wait for them. Where it is the only member's own, what reads them is
// enqueued behind; everybody else starts when they are there.
static rm_code await_tensors(rm_ranks *ranks, const rm_entry *entries, int64_t n, rm_error *err) {
  const rm_device *only = ranks->n == 1 ? &ranks->members[0].device : NULL;
  uint64_t asked = 0;
  rm_code code = RM_OK;
  for (int64_t i = 0; i < n && !code; i++) {
    const rm_tensor *tensor = &entries[i].tensor;
    if (!tensor->on_device || !ranks->readers.library || (only && tensor->ordinal == only->ordinal)) continue;
    if (tensor->ordinal >= 0 && tensor->ordinal < RM_MAX_GPUS && asked >> tensor->ordinal & 1) continue;
    code = rm_readers_wait(&ranks->readers, tensor->ordinal, err);
    if (!code) asked |= (uint64_t)1 << tensor->ordinal;
  }
  return code;
}

rm_code rm_ranks_sync_push_all(rm_ranks *ranks, const rm_entry *entries, int64_t n, rm_error *err) {
  pushed it = {entries, n};
  rm_code code = await_tensors(ranks, entries, n, err);
  if (code) return code;
  code = on_all(ranks, push_member, &it, err);
  for (int r = 0; r < ranks->n && code; r++)
    for (int64_t i = 0; i < n && !ranks->members[r].code; i++)
      rm_sync_forget(rm_engine_store(ranks->members[r].engine), entries[i].name, entries[i].length);
  return code;
}

rm_code rm_ranks_sync_push(rm_ranks *ranks, const char *name, size_t length, const rm_tensor *tensor, rm_error *err) {
  const rm_entry entry = {name, length, *tensor};
  return rm_ranks_sync_push_all(ranks, &entry, 1, err);
}

static rm_code commit_member(rm_member *member, void *arg) {
  return rm_engine_sync_commit(member->engine, *(const rm_inflight *)arg, &member->report, &member->err);
}

rm_code rm_ranks_sync_commit(rm_ranks *ranks, rm_inflight inflight, rm_sync_report *report, rm_error *err) {
  // What would refuse on the ranks of one replica alone is asked first: it leaves the sync open, and must on all.
  if (inflight == RM_INFLIGHT_REFUSE && rm_ranks_unfinished(ranks) && rm_store_is_open(rm_engine_store(ranks->members[0].engine)))
    return rm_fail(err, RM_E_STATE, "%lld requests are unfinished; finish them, or choose restart, abort or keep",
                   (long long)rm_ranks_unfinished(ranks));
  const rm_code code = on_all(ranks, commit_member, &inflight, err);
  if (code || !report) return code;
  *report = ranks->members[0].report;
  for (int r = 1; r < ranks->n; r++) {
    const rm_sync_report *its = &ranks->members[r].report;
    report->bytes += its->bytes;
    report->seconds = its->seconds > report->seconds ? its->seconds : report->seconds;
    report->copy_seconds = its->copy_seconds > report->copy_seconds ? its->copy_seconds : report->copy_seconds;
  }
  return RM_OK;
}

void rm_ranks_sync_abort(rm_ranks *ranks) {
  for (int r = 0; r < ranks->n; r++) rm_engine_sync_abort(ranks->members[r].engine);
}

static rm_code sleep_member(rm_member *member, void *arg) { return rm_engine_sleep(member->engine, *(const unsigned *)arg, &member->err); }
static rm_code wake_member(rm_member *member, void *arg) { return rm_engine_wake(member->engine, *(const unsigned *)arg, &member->err); }

static rm_code keep_member(rm_member *member, void *arg) {
  (void)arg;
  return rm_engine_keep_weights(member->engine, &member->err);
}

void rm_ranks_forget_kept(rm_ranks *ranks) {
  for (int r = 0; r < ranks->n; r++) rm_engine_forget_kept(ranks->members[r].engine);
}

size_t rm_ranks_bytes_to_keep(const rm_ranks *ranks) {
  size_t wanted = 0;
  for (int r = 0; r < ranks->n; r++) wanted += rm_engine_bytes_to_keep(ranks->members[r].engine);
  return wanted;
}

// The ranks of a process have one host; each asks for itself once more.
static rm_code check_host_room(const rm_ranks *ranks, rm_error *err) {
  const size_t available = rm_memory_available(), wanted = rm_ranks_bytes_to_keep(ranks);
  if (wanted <= available) return RM_OK;
  return rm_fail(err, RM_E_CAPACITY, "the weights of %d ranks take %s and the host has %s left to keep them in", ranks->n,
                 rm_say_bytes((double)wanted).text, rm_say_bytes((double)available).text);
}

rm_code rm_ranks_keep_weights(rm_ranks *ranks, rm_error *err) {
  rm_code code = check_host_room(ranks, err);
  if (code) return code;
  code = on_all(ranks, keep_member, NULL, err);
  if (code) rm_ranks_forget_kept(ranks);
  return code;
}

// What can fail comes first, on all.
rm_code rm_ranks_sleep(rm_ranks *ranks, unsigned parts, rm_error *err) {
  const int keep = parts & RM_SLEEP_KEEP && parts & RM_PART_WEIGHTS;
  const rm_code code = keep ? rm_ranks_keep_weights(ranks, err) : RM_OK;
  return code ? code : on_all(ranks, sleep_member, &parts, err);
}

rm_code rm_ranks_wake(rm_ranks *ranks, unsigned parts, rm_error *err) {
  unsigned asleep = 0;
  for (int r = 0; r < ranks->n; r++) {
    rm_engine_stats stats;
    rm_engine_statistics(ranks->members[r].engine, &stats);
    asleep |= stats.asleep;
  }
  const rm_code code = on_all(ranks, wake_member, &parts, err);
  parts = (parts & asleep) | RM_SLEEP_KEEP;
  if (code && parts & asleep) on_all(ranks, sleep_member, &parts, NULL);   // one could not: none does
  return code;
}

// ---------------------------------------------------------------------------------------------- figures
static double longest(double a, double b) { return a > b ? a : b; }

void rm_ranks_statistics(const rm_ranks *ranks, rm_engine_stats *out) {
  rm_engine_statistics(ranks->members[0].engine, out);
  for (int r = 1; r < ranks->n; r++) {
    rm_engine_stats its;
    rm_engine_statistics(ranks->members[r].engine, &its);
    out->weight_bytes += its.weight_bytes;
    out->kv_bytes += its.kv_bytes;
    out->workspace_bytes += its.workspace_bytes;
    out->n_threads += its.n_threads;
    out->comm_bytes += its.comm_bytes;
    out->comm_calls = rm_max64(out->comm_calls, its.comm_calls);
    out->comm_seconds = longest(out->comm_seconds, its.comm_seconds);
    out->forward_seconds = longest(out->forward_seconds, its.forward_seconds);
    out->schedule_seconds = longest(out->schedule_seconds, its.schedule_seconds);
    out->commit_seconds = longest(out->commit_seconds, its.commit_seconds);
    if (r % ranks->per_replica) continue;
    out->waiting += its.waiting, out->running += its.running, out->rows += its.rows;
    out->steps = rm_max64(out->steps, its.steps);
    out->generated_tokens += its.generated_tokens, out->prompt_tokens += its.prompt_tokens, out->cached_tokens += its.cached_tokens;
    out->preemptions += its.preemptions, out->replays += its.replays, out->evictions += its.evictions;
    out->kv_pages += its.kv_pages, out->kv_pages_free += its.kv_pages_free;
    out->prefix_hits += its.prefix_hits, out->prefix_misses += its.prefix_misses;
  }
}
