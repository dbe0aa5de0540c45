// ranks.c: see ranks.h. Creation, jobs on all ranks, statistics. Requests are in ranks_requests.c,
// weights in ranks_weights.c.
#include "local_mesh/ranks_state.h"

#include <string.h>

#include "base/memory.h"
#include "device/cuda.h"

// ------------------------------------------------------------------------------------------- jobs
typedef struct member_job {
  rm_ranks *ranks;
  rm_member_call call;
  void *arg;
} member_job;

static void member_task(void *arg, int thread, int n_threads) {
  const member_job *job = arg;
  for (int r = thread; r < job->ranks->n; r += n_threads) {
    rm_member *member = &job->ranks->members[r];
    member->code = job->call(member, job->arg);
  }
}

// Errors that another rank has caused.
static int is_secondhand(rm_code code) {
  return code == RM_E_RANK_LOST || code == RM_E_SYNC_ABORTED;
}

// All have lost a rank: reports the first message, and another rank's if it differs.
static void tell_both(const rm_ranks *ranks, const rm_member *first, rm_error *err) {
  const char *text = rm_error_message(&first->err);
  const rm_member *other = NULL;
  for (int r = 0; r < ranks->n && !other; r++)
    if (ranks->members[r].code == first->code &&
        strcmp(rm_error_message(&ranks->members[r].err), text))
      other = &ranks->members[r];
  if (!other) rm_fail(err, first->code, "%s", text);
  else
    rm_fail(err, first->code, "rank %d: %.300s; rank %d: %.300s", (int)(first - ranks->members),
            text, (int)(other - ranks->members), rm_error_message(&other->err));
}

// Moves the error to return to err, and clears the others.
static rm_code first_error(rm_ranks *ranks, rm_error *err) {
  rm_member *worst = NULL;
  for (int r = 0; r < ranks->n; r++) {
    rm_member *member = &ranks->members[r];
    if (member->code && (!worst || (is_secondhand(worst->code) && !is_secondhand(member->code))))
      worst = member;
  }
  const rm_code code = worst ? worst->code : RM_OK;
  if (code == RM_E_RANK_LOST) tell_both(ranks, worst, err);
  else if (worst) rm_fail(err, code, "%s", rm_error_message(&worst->err));
  for (int r = 0; r < ranks->n; r++) rm_error_clear(&ranks->members[r].err);
  return code;
}

rm_code rm_ranks_run(rm_ranks *ranks, rm_member_call call, void *arg, rm_error *err) {
  member_job job = {ranks, call, arg};
  if (ranks->team) rm_team_run(ranks->team, member_task, &job);
  for (int r = 0; r < ranks->n && !ranks->team; r++)
    ranks->members[r].code = call(&ranks->members[r], arg);
  return first_error(ranks, err);
}

// ------------------------------------------------------------------------------------------- life
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
  return rm_cuda_device(options->cuda_library, ordinal, options->cuda_family, &member->device,
                        &member->err);
}

static rm_code make_engine(rm_member *member, const creation *how) {
  const rm_ranks *ranks = how->ranks;
  rm_engine_options options = how->options->engine;
  char card[32] = "";
  rm_code code = open_device(member, how->options, ranks->first + (int)(member - ranks->members));
  if (!code && member->device.self)
    code = rm_cuda_bus_id(how->options->cuda_library, member->device.ordinal, card, &member->err);
  if (code) return code;
  if (member->device.self) options.device = &member->device;
  options.memory = rm_memory_name(card);
  options.rank = (rm_rank){
      .mesh = ranks->mesh,
      .index = ranks->first + (int32_t)(member - ranks->members),
      .tp = member->groups[RM_GROUP_TP],
      .ep = member->groups[RM_GROUP_EP],
      .world = member->groups[RM_GROUP_WORLD],
      .dispatcher = how->options->dispatcher,
      .sequence_parallel = how->options->sequence_parallel,
  };
  if (ranks->n > 1)
    options.n_threads = options.n_threads > ranks->n ? options.n_threads / ranks->n : 1;
  return rm_engine_create(how->spec, &options, &member->engine, &member->err);
}

// On an error aborts the groups, since other ranks may wait for this one while they create their
// engines.
static rm_code create_engine(rm_member *member, void *arg) {
  const rm_code code = make_engine(member, arg);
  for (int group = 0; group < N_GROUPS && code; group++)
    if (member->groups[group]) rm_comm_abort(member->groups[group], code);
  return code;
}

// Called on all ranks together, since they leave an NCCL group together.
static rm_code destroy_engine(rm_member *member, void *arg) {
  (void)arg;
  rm_engine_destroy(member->engine);
  member->engine = NULL;
  return RM_OK;
}

static rm_code connect(rm_ranks *ranks, rm_error *err) {
  const rm_region_options region = {.world = ranks->n,
                                    .n_groups = N_GROUPS,
                                    .buffer_bytes = RM_GROUP_BUFFER_BYTES,
                                    .timeout = 600};
  rm_code code;
  if ((code = rm_team_create(ranks->n, &ranks->team, err))) return code;
  if ((code = rm_region_create(&region, &ranks->region, err))) return code;
  for (int r = 0; r < ranks->n; r++)
    for (int group = 0; group < N_GROUPS; group++)
      if ((code = rm_groups_comm(ranks->region, &ranks->mesh, group, r,
                                 &ranks->members[r].groups[group], err)))
        return code;
  return RM_OK;
}

// All ranks must have the same family of kernels: GPUs of different architectures have different
// bits. Processes compare families when they connect.
static rm_code check_families(const rm_ranks *ranks, rm_error *err) {
  const rm_member *first = &ranks->members[0];
  for (int r = 1; r < ranks->n && first->device.self; r++) {
    const rm_device *device = &ranks->members[r].device;
    if (strcmp(device->kernels->family, first->device.kernels->family) != 0)
      return rm_fail(err, RM_E_MESH_MISMATCH, "rank %d has family = %s on %s, rank 0 %s on %s", r,
                     device->kernels->family, device->name, first->device.kernels->family,
                     first->device.name);
  }
  return RM_OK;
}

static rm_code create_parts(rm_ranks *ranks, const rm_spec *spec, const rm_ranks_options *options,
                            rm_error *err) {
  creation how = {ranks, spec, options};
  ranks->members = rm_alloc((size_t)ranks->n, sizeof *ranks->members);
  ranks->assigned = rm_alloc((size_t)ranks->mesh.dp, sizeof *ranks->assigned);
  ranks->prefixes = rm_alloc(PREFIX_SLOTS, sizeof *ranks->prefixes);
  if (!ranks->members || !ranks->assigned || !ranks->prefixes)
    return rm_fail(err, RM_E_MEMORY, "no memory for %d ranks", ranks->n);
  if (options->endpoints) {
    rm_comm *const groups[N_GROUPS] = {options->endpoints->tp, options->endpoints->ep,
                                       options->endpoints->world};
    memcpy(ranks->members[0].groups, groups, sizeof groups);
  } else if (ranks->n > 1) {
    const rm_code code = connect(ranks, err);
    if (code) return code;
  }
  rm_code code = rm_ready_streams_init(&ranks->ready_streams, options->cuda_library, err);
  if (!code) code = rm_ranks_run(ranks, create_engine, &how, err);
  if (!code) code = check_families(ranks, err);
  for (int r = ranks->n - 1; r >= 0 && !code; r--) {
    const rm_device *device = &ranks->members[r].device;
    if (device->self && device->ordinal < RM_MAX_GPUS)
      ranks->ready_streams.own[device->ordinal] = device;
  }
  return code;
}

rm_code rm_ranks_create(const rm_spec *spec, const rm_ranks_options *options, rm_ranks **out,
                        rm_error *err) {
  const int world = rm_mesh_world(&options->mesh);
  *out = NULL;
  rm_code code = rm_placement_check(spec, &options->mesh, err);
  if (code) return code;
  if (options->endpoints && (options->endpoints->index < 0 || options->endpoints->index >= world))
    return rm_fail(err, RM_E_CONFIG, "rank %d: expected a rank of a world of %d",
                   options->endpoints->index, world);
  if (options->engine.external_pages > 0 && !options->endpoints && world > 1)
    return rm_fail(
        err, RM_E_CONFIG,
        "a mesh of %d ranks with an external scheduler: expected one rank in each process", world);
  rm_ranks *ranks = rm_alloc(1, sizeof *ranks);
  if (!ranks) return rm_fail(err, RM_E_MEMORY, "no memory for the ranks");
  ranks->mesh = options->mesh;
  ranks->n = options->endpoints ? 1 : world;
  ranks->first = options->endpoints ? options->endpoints->index : 0;
  ranks->n_replicas = options->endpoints ? 1 : ranks->mesh.dp;
  ranks->per_replica = options->endpoints ? 1 : ranks->mesh.tp;
  ranks->own = rm_mesh_coords(&ranks->mesh, ranks->first).dp;
  ranks->page_size = options->engine.page_size;
  ranks->has_external_scheduler = options->engine.external_pages > 0;
  ranks->next_id = 1;
  code = create_parts(ranks, spec, options, err);
  if (code) {
    if (options->endpoints && ranks->members)
      memset(ranks->members[0].groups, 0, sizeof ranks->members[0].groups); // the caller's still
    rm_ranks_destroy(ranks);
    return code;
  }
  *out = ranks;
  return RM_OK;
}

void rm_ranks_destroy(rm_ranks *ranks) {
  if (!ranks) return;
  if (ranks->members) rm_ranks_run(ranks, destroy_engine, NULL, NULL);
  rm_ready_streams_destroy(&ranks->ready_streams);
  for (int r = 0; ranks->members && r < ranks->n; r++) {
    if (ranks->members[r].device.self)
      ranks->members[r].device.close(ranks->members[r].device.self);
    for (int group = 0; group < N_GROUPS; group++) rm_comm_destroy(ranks->members[r].groups[group]);
    rm_error_clear(&ranks->members[r].err);
  }
  rm_region_release(ranks->region);
  rm_team_destroy(ranks->team);
  rm_free(ranks->members);
  rm_free(ranks->assigned);
  rm_free(ranks->prefixes);
  rm_free(ranks);
}

void rm_ranks_abort_groups(rm_ranks *ranks) {
  for (int r = 0; r < ranks->n; r++)
    for (int group = 0; group < N_GROUPS; group++)
      if (ranks->members[r].groups[group])
        rm_comm_abort(ranks->members[r].groups[group], RM_E_RANK_LOST);
}

rm_mesh rm_ranks_mesh(const rm_ranks *ranks) { return ranks->mesh; }
rm_engine *rm_ranks_engine(rm_ranks *ranks, int member) { return ranks->members[member].engine; }
int rm_ranks_reads_gpus(const rm_ranks *ranks) { return ranks->ready_streams.library != NULL; }
rm_code rm_ranks_ready_queue(rm_ranks *ranks, int ordinal, const rm_device **out, rm_error *err) {
  return rm_ready_streams_find(&ranks->ready_streams, ordinal, out, err);
}

// ------------------------------------------------------------------------------------- statistics
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
    out->generated_tokens += its.generated_tokens, out->prompt_tokens += its.prompt_tokens,
        out->cached_tokens += its.cached_tokens;
    out->preemptions += its.preemptions, out->replays += its.replays,
        out->evictions += its.evictions;
    out->kv_pages += its.kv_pages, out->kv_pages_free += its.kv_pages_free;
    out->prefix_hits += its.prefix_hits, out->prefix_misses += its.prefix_misses;
  }
}
