// mesh_kill.c: processes that exchange over shared memory, one of which is killed.
//
// Each case forks 2 … 6 ranks, which attach to a region and make the calls of common/talk.h, in a
// group of all and in smaller groups, until they fail. One rank is killed at a random moment, in a
// third of the cases while they attach. Every other rank must then fail with RankLostError and the
// number of that rank, whichever group it was in. While they attach, CollectiveTimeoutError is
// right too: for ranks that wait for a rank that never attached, with its number, and for ranks
// that come when the others have given up. The bytes that arrived before must be correct. After the
// last survivor the region's name must be free.
// Prints the time from the kill to the last survivor's error, over the cases in which all had
// attached.
//
//   mesh_kill [--kills 30] [--seed 1] [--first 0]
//     Each --plant must end in a failure:
//     --plant 1: the rank is stopped, not killed   2: a file is left behind
#include <fcntl.h>
#include <stdlib.h>

#include "common/fuzz.h"
#include "common/ranks.h"
#include "common/talk.h"

enum { GROUPS = 2, MOST = 6000 };

typedef struct scene {
  char name[64];
  uint64_t seed;
  int world, part; // ranks; and of those, how many neighbours are a group of index 1
  double patience; // of a call
  rm_region_options options;
  const char *where;
} scene;

static void give_up(rm_comm *comms[], rm_code why) {
  for (int g = 0; g < GROUPS; g++) rm_comm_abort(comms[g], why);
}

static rm_comm *group_of(rm_region *region, int index, int first, int n, int rank) {
  int32_t members[RANKS_MAX];
  rm_comm *comm;
  rm_error err = RM_ERROR_INIT;
  for (int i = 0; i < n; i++) members[i] = first + i;
  tiny_must(rm_region_comm(region, index, members, n, rank, &comm, &err), &err);
  return comm;
}

static void live(int rank, ranks_word *word, void *arg) {
  const scene *s = arg;
  rm_region *region;
  rm_error err = RM_ERROR_INIT;
  rm_code code = rm_region_attach(s->name, rank, s->seed, &s->options, &region, &err);
  if (code) {
    ranks_ended(word, code, &err);
    return;
  }
  atomic_store(&word->attached, 1);
  const int first = rank / s->part * s->part,
            n = s->world - first < s->part ? s->world - first : s->part;
  rm_comm *comms[GROUPS] = {group_of(region, 0, 0, s->world, rank),
                            group_of(region, 1, first, n, rank)};
  talk talks[GROUPS] = {talk_begin(comms[0], s->seed, MOST),
                        talk_begin(comms[1], s->seed + 1 + (uint64_t)first, MOST)};
  uint64_t made[GROUPS] = {0};
  rm_region_release(region);
  for (uint64_t call = 0; !code; call++) {
    const int g = (int)(tiny_mix(s->seed ^ call) % GROUPS);
    rm_comm_set_timeout(comms[g], s->patience);
    code = talk_call(&talks[g], made[g]++, &err);
    atomic_fetch_add(&word->calls, 1);
  }
  ranks_ended(word, code, &err);
  give_up(comms, code);
  for (int g = 0; g < GROUPS; g++) rm_comm_destroy(comms[g]);
}

static int all_attached(const ranks *r) {
  int n = 0;
  for (int rank = 0; rank < r->world; rank++) n += atomic_load(&r->words[rank].attached);
  return n == r->world;
}

// In a third of the cases a moment in the first milliseconds, else one after all have attached; 1
// when they had.
static int wait_for_the_moment(fuzz *f, const ranks *r) {
  const int early = f->at % 3 == 0;
  const double moment = (double)fuzz_below(f, 1000) * 1e-6 * (early ? 3 : 15);
  const double limit = ranks_clock() + RANKS_MINUTE;
  while (!early && !all_attached(r)) {
    if (ranks_clock() > limit) tiny_die("%s: the ranks did not attach", fuzz_where(f));
    ranks_pause(0.0005);
  }
  ranks_pause(moment);
  return all_attached(r);
}

// Checks that every survivor's result is allowed; returns the latest.
static double check_survivors(const scene *s, const ranks *r, int victim, int had_attached) {
  char name[24], after[24];
  double last = 0;
  snprintf(name, sizeof name, "rank %d", victim);
  snprintf(after, sizeof after, "rank %d:", victim);
  for (int rank = 0; rank < s->world; rank++) {
    const ranks_word *word = &r->words[rank];
    if (rank == victim) continue;
    const int lost =
        word->code == RM_E_RANK_LOST && strstr(word->text, "lost ") && strstr(word->text, after);
    const int in_vain = !had_attached && word->code == RM_E_COLLECTIVE_TIMEOUT &&
                        !atomic_load(&word->attached) &&
                        (strstr(word->text, name) || strstr(word->text, "no region"));
    if (!lost && !in_vain)
      tiny_die("%s: rank %d of %d was killed, rank %d has %s: %s", s->where, victim, s->world, rank,
               rm_code_name(word->code), word->text);
    if (word->when > last) last = word->when;
  }
  return last;
}

// Kills one rank; returns the seconds until the last survivor had its error, −1 when not all had
// attached.
static double kill_case(fuzz *f, ranks *r, long *calls) {
  scene s = {.where = fuzz_where(f), .seed = fuzz_bits(f), .world = 2 + (int)fuzz_below(f, 5)};
  s.patience = f->plant ? 1 : 30;
  s.part = 1 + (int)fuzz_below(f, s.world);
  s.options = (rm_region_options){.world = s.world,
                                  .n_groups = GROUPS,
                                  .buffer_bytes = 64 + (size_t)fuzz_below(f, 4000),
                                  .timeout = 4};
  const int victim = (int)fuzz_below(f, s.world);
  snprintf(s.name, sizeof s.name, "kill-%d-%ld", (int)getpid(), f->at);
  ranks_start(r, s.world, live, &s);
  const int had_attached = wait_for_the_moment(f, r);
  const double then = ranks_clock();
  if (f->plant == 1) kill(r->pids[victim], SIGSTOP);
  else ranks_kill(r, victim);
  for (int rank = 0; rank < s.world; rank++) {
    if (f->plant == 1 && rank == victim) continue;
    const int status = ranks_wait(r, rank, s.where);
    if (rank == victim ? !WIFSIGNALED(status) : !WIFEXITED(status) || WEXITSTATUS(status))
      tiny_die("%s: rank %d has wait status %d", s.where, rank, status);
    *calls += atomic_load(&r->words[rank].calls);
  }
  if (f->plant == 1) ranks_kill(r, victim), ranks_wait(r, victim, s.where);
  if (f->plant == 2) {
    char path[100];
    snprintf(path, sizeof path, "/dev/shm/rollmesh.%s", s.name);
    close(open(path, O_CREAT | O_RDWR, 0600));
  }
  const double last = check_survivors(&s, r, victim, had_attached);
  if (ranks_left_behind(s.name)) {
    char path[100];
    snprintf(path, sizeof path, "/dev/shm/rollmesh.%s", s.name);
    unlink(path);
    tiny_die("%s: %s is still there", s.where, path);
  }
  return had_attached ? last - then : -1;
}

static int by_size(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

int main(int argc, char **argv) {
  fuzz f = {.seed = 1, .cases = 30};
  option_read(argc, argv,
              (option[]){{"kills", .least = 1, .most = 1000 * 1000, .count = &f.cases},
                         {"first", .most = OPTION_MOST, .count = &f.first},
                         {"plant", .most = 2, .count = &f.plant},
                         {"seed", .bits = &f.seed},
                         {0}});
  f.at = f.first - 1;
  double *seconds = calloc((size_t)f.cases + 1, sizeof *seconds);
  long n = 0, attaching = 0, calls = 0;
  ranks r = ranks_make();
  if (!seconds) tiny_die("no memory for %ld cases", f.cases);
  while (fuzz_next_case(&f)) {
    const double taken = kill_case(&f, &r, &calls);
    if (taken < 0) attaching++;
    else seconds[n++] = taken;
  }
  qsort(seconds, (size_t)n, sizeof *seconds, by_size);
  printf(
      "mesh_kill: %ld kills, %ld while attaching, in %ld calls; the last survivor knew after %.1f "
      "ms (median), %.1f (95%%), %.1f (max)\n",
      n + attaching, attaching, calls, 1e3 * seconds[n / 2], 1e3 * seconds[n * 95 / 100],
      1e3 * seconds[n ? n - 1 : 0]);
  free(seconds);
  return 0;
}
