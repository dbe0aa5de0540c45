// mesh_attach.c: processes attach to a region by name. The scenes test the owner and content of the
// file, ranks that do not come, what a dead run has left, a rank that is stopped and continued, and
// a rank that leaves.
//
// Each scene forks ranks that attach, exchange a few times and report their results. The oracle is
// the expected code and words in the message of each rank, and that the file is removed.
//
//   mesh_attach [--rounds 1] [--plant 1: a scene without a fault]
#include <fcntl.h>
#include <sys/stat.h>

#include "base/memory.h"
#include "comm/shm/layout.h"
#include "common/option.h"
#include "common/ranks.h"
#include "common/talk.h"

typedef struct scene {
  const char *what;
  char name[80], path[120];
  int world; // ranks in the region
  double timeout;
  int odd; // a rank that does something else, −1: none
  uint64_t odd_nonce; // added to its own
  int odd_world, odd_delay_ms; // its world when not 0; when it comes, −1: once two others have
  int odd_rank; // the rank number that it claims, if not 0
  int goes_home; // after a call: 1 by destroying its end, 2 by ending its process
  int calls;
} scene;

static int n_scenes;
static long planted;

static void fail(const scene *s, const char *format, int rank, const ranks_word *word) {
  char text[800];
  snprintf(text, sizeof text, format, rank, rm_code_name(word->code), word->text);
  tiny_die("%s: %s", s->what, text);
}

static void wait_for_two(const scene *s) {
  uint32_t n = 0;
  for (int i = 0; n < 2; i++) {
    if (i > 60 * 1000) tiny_die("%s: the others do not come", s->what);
    ranks_pause(0.001);
    const int file = open(s->path, O_RDONLY);
    if (file >= 0 &&
        pread(file, &n, sizeof n, offsetof(rm_region_map, n_attached)) != (ssize_t)sizeof n)
      n = 0;
    close(file);
  }
}

static void visit(int process, ranks_word *word, void *arg) {
  const scene *s = arg;
  const int odd = process == s->odd && !planted, rank = odd && s->odd_rank ? s->odd_rank : process;
  const rm_region_options options = {.world = odd && s->odd_world ? s->odd_world : s->world,
                                     .n_groups = 1,
                                     .buffer_bytes = 3000,
                                     .timeout = s->timeout};
  int32_t members[RANKS_MAX];
  rm_region *region;
  rm_comm *comm;
  rm_error err = RM_ERROR_INIT;
  if (odd && s->odd_delay_ms < 0) wait_for_two(s);
  else if (odd) ranks_pause(1e-3 * s->odd_delay_ms);
  rm_code code =
      rm_region_attach(s->name, rank, 99 + (odd ? s->odd_nonce : 0), &options, &region, &err);
  if (code) {
    ranks_ended(word, code, &err);
    return;
  }
  atomic_store(&word->attached, 1);
  for (int r = 0; r < s->world; r++) members[r] = r;
  tiny_must(rm_region_comm(region, 0, members, s->world, rank, &comm, &err), &err);
  talk t = talk_begin(comm, 5, 4000);
  for (int call = 0; call < s->calls && !code; call++) {
    if (odd && s->goes_home && call == 1) {
      if (s->goes_home == 1) rm_comm_destroy(comm);
      else ranks_ended(word, RM_OK, &err), _exit(0);
      ranks_pause(0.5);
      break;
    }
    code = talk_call(&t, (uint64_t)call, &err);
    atomic_fetch_add(&word->calls, 1);
  }
  ranks_ended(word, code, &err);
}

// Every process must exit without a signal, with the expected code and word. `processes` may be
// more or fewer than the world.
static void play(ranks *r, scene *s, int processes, rm_code others, const char *others_say,
                 rm_code odd, const char *odd_says) {
  ranks_start(r, processes, visit, s);
  for (int p = 0; p < processes; p++)
    if (ranks_wait(r, p, s->what)) tiny_die("%s: process %d did not end well", s->what, p);
  for (int p = 0; p < processes; p++) {
    const rm_code want = p == s->odd ? odd : others;
    const char *says = p == s->odd ? odd_says : others_say;
    if (r->words[p].code != want || (want && !strstr(r->words[p].text, says)))
      fail(s, "process %d has %s: %s", p, &r->words[p]);
  }
  if (ranks_left_behind(s->name)) tiny_die("%s: %s is still there", s->what, s->path);
}

static scene scene_of(const char *what, int world) {
  scene s = {.what = what, .world = world, .timeout = 20, .odd = -1, .calls = 20};
  snprintf(s.name, sizeof s.name, "attach-%d-%d", (int)getpid(), n_scenes++);
  snprintf(s.path, sizeof s.path, "/dev/shm/rollmesh.%s", s.name);
  return s;
}

// -------------------------------------------------------------------------------------- the ranks
static void ranks_that_differ(ranks *r) {
  scene s = scene_of("all as it should be", 4);
  play(r, &s, 4, RM_OK, "", RM_OK, "");
  s = scene_of("one rank alone", 1);
  play(r, &s, 1, RM_OK, "", RM_OK, "");
  s = scene_of("a late rank", 4);
  s.odd = 2, s.odd_delay_ms = 100;
  play(r, &s, 4, RM_OK, "", RM_OK, "");
  s = scene_of("a late rank 0", 4);
  s.odd = 0, s.odd_delay_ms = 100;
  play(r, &s, 4, RM_OK, "", RM_OK, "");
  s = scene_of("another world", 3);
  s.odd = 1, s.odd_world = 4, s.odd_delay_ms = -1;
  play(r, &s, 3, RM_E_MESH_MISMATCH, "rank 1", RM_E_MESH_MISMATCH, "world=4");
  s = scene_of("a rank that does not come", 3);
  s.timeout = 0.3;
  play(r, &s, 2, RM_E_COLLECTIVE_TIMEOUT, "rank 2 did not attach", RM_OK, "");
  s = scene_of("ranks that do not come", 4);
  s.timeout = 0.3;
  play(r, &s, 2, RM_E_COLLECTIVE_TIMEOUT, "ranks 2, 3 did not attach", RM_OK, "");
  s = scene_of("no rank 0", 3);
  s.timeout = 0.3, s.odd = 0, s.odd_delay_ms = 1000, s.odd_rank = 1;
  play(r, &s, 3, RM_E_COLLECTIVE_TIMEOUT, "rank 0 did not make it", RM_E_COLLECTIVE_TIMEOUT,
       "rank 0 did not make it");
  s = scene_of("a twin", 3);
  s.timeout = 1, s.odd = 2, s.odd_delay_ms = -1, s.odd_rank = 1;
  play(r, &s, 3, RM_E_COLLECTIVE_TIMEOUT, "rank 2 did not attach", RM_E_MESH_MISMATCH,
       "attached twice");
}

static void ranks_that_go(ranks *r) {
  scene s = scene_of("a rank that leaves", 4);
  s.odd = 3, s.goes_home = 1;
  play(r, &s, 4, RM_E_RANK_LOST, "lost rank 3: it has left", RM_OK, "");
  s = scene_of("a process that ends", 4);
  s.odd = 0, s.goes_home = 2;
  play(r, &s, 4, RM_E_RANK_LOST, "lost rank 0: the process has ended", RM_OK, "");
}

// A rank is stopped: the others have a deadline. When it continues, it gets the same error.
static void rank_that_stops(ranks *r) {
  scene s = scene_of("a rank that is stopped", 3);
  s.timeout = 0.4, s.calls = 1 << 30;
  ranks_start(r, 3, visit, &s);
  for (int i = 0; atomic_load(&r->words[1].calls) < 3 || atomic_load(&r->words[2].calls) < 3; i++) {
    if (i > 60 * 1000) tiny_die("%s: the ranks make no calls", s.what);
    ranks_pause(0.001);
  }
  kill(r->pids[2], SIGSTOP);
  for (int p = 0; p < 2; p++) ranks_wait(r, p, s.what);
  kill(r->pids[2], SIGCONT);
  ranks_wait(r, 2, s.what);
  for (int p = 0; p < 3; p++)
    if (r->words[p].code != RM_E_COLLECTIVE_TIMEOUT ||
        !strstr(r->words[p].text, "rank 2 did not arrive") ||
        strcmp(r->words[p].text, r->words[0].text))
      fail(&s, "rank %d has %s: %s", p, &r->words[p]);
}

// --------------------------------------------------------------------------------------- the file
static int make_open(const scene *s, const void *data, size_t bytes, mode_t mode) {
  const int file = open(s->path, O_CREAT | O_EXCL | O_RDWR, 0600);
  if (file < 0 || fchmod(file, mode) || write(file, data, bytes) != (ssize_t)bytes)
    tiny_die("%s: cannot make %s", s->what, s->path);
  return file;
}

static void make(const scene *s, const void *data, size_t bytes, mode_t mode) {
  close(make_open(s, data, bytes, mode));
}

// Foreign files are not changed, and every rank reports them.
static void refuse(ranks *r, scene *s, const char *says) {
  ranks_start(r, s->world, visit, s);
  for (int p = 0; p < s->world; p++) ranks_wait(r, p, s->what);
  for (int p = 0; p < s->world; p++)
    if (r->words[p].code != RM_E_AUTH || !strstr(r->words[p].text, says))
      fail(s, "rank %d has %s: %s", p, &r->words[p]);
  if (!ranks_left_behind(s->name)) tiny_die("%s: somebody removed the file", s->what);
  unlink(s->path);
}

static rm_region_head head_of(uint64_t nonce, uint64_t maker) {
  return (rm_region_head){.magic = "rollmesh region",
                          .nonce = nonce,
                          .maker = maker,
                          .world = 3,
                          .n_groups = 1,
                          .buffer_bytes = 3000};
}

static void files(ranks *r) {
  static char zeros[1 << 20];
  rm_region_head head = head_of(99, (uint64_t)getpid());
  scene s = scene_of("a file that others may read", 3);
  make(&s, &head, sizeof head, 0644);
  refuse(r, &s, "mode 644");
  s = scene_of("a file of something else", 3);
  make(&s, zeros, sizeof zeros, 0600);
  refuse(r, &s, "not a region");
  s = scene_of("an empty file", 3);
  make(&s, zeros, 0, 0600);
  refuse(r, &s, "not a region");
  s = scene_of("a link", 3);
  if (symlink("/dev/null", s.path)) tiny_die("no link");
  refuse(r, &s, "cannot be opened");
  s = scene_of("a folder", 3);
  if (mkdir(s.path, 0600)) tiny_die("no folder");
  ranks_start(r, 3, visit, &s);
  for (int p = 0; p < 3; p++)
    if (ranks_wait(r, p, s.what) || r->words[p].code != RM_E_AUTH)
      fail(&s, "rank %d has %s: %s", p, &r->words[p]);
  rmdir(s.path);
  if (geteuid() == 0) {
    s = scene_of("a file of another user", 3);
    make(&s, &head, sizeof head, 0600);
    if (chown(s.path, 65534, 65534)) tiny_die("no other user");
    refuse(r, &s, "owner 65534");
  }
}

// Files of runs that ended are replaced, also when their pid is used again; those of runs that go
// on are not.
static void stale_files(ranks *r) {
  rm_region_head head = head_of(98, (uint64_t)getpid()); // its lock is free
  scene s = scene_of("a file of an earlier process with a pid that lives", 3);
  make(&s, &head, sizeof head, 0600);
  play(r, &s, 3, RM_OK, "", RM_OK, "");
  s = scene_of("a file of a process that ended", 3);
  const pid_t child = fork();
  if (child == 0) _exit(0);
  waitpid(child, NULL, 0);
  head = head_of(99, (uint64_t)child);
  make(&s, &head, sizeof head, 0600);
  play(r, &s, 3, RM_OK, "", RM_OK, "");
  s = scene_of("a file of a run that goes on", 3);
  head = head_of(98, (uint64_t)getpid());
  const int file = make_open(&s, &head, sizeof head, 0600);
  rm_process_lock(file, 0);
  ranks_start(r, 3, visit, &s);
  for (int p = 0; p < 3; p++) ranks_wait(r, p, s.what);
  for (int p = 0; p < 3; p++)
    if (r->words[p].code != RM_E_AUTH) fail(&s, "rank %d has %s: %s", p, &r->words[p]);
  if (!ranks_left_behind(s.name)) tiny_die("%s: somebody removed it", s.what);
  close(file);
  unlink(s.path);
  s = scene_of("a rank of another run", 3);
  s.odd = 1, s.odd_nonce = 1, s.timeout = 0.5, s.odd_delay_ms = 50;
  play(r, &s, 3, RM_E_COLLECTIVE_TIMEOUT, "rank 1 did not attach", RM_E_AUTH, "another nonce");
}

// All ranks of a run are killed while rank 1 has not come yet; the next run of that name finds what
// they left.
static void run_after_a_massacre(ranks *r) {
  scene s = scene_of("a run whose ranks were all killed", 3);
  ranks_start(r, 1, visit, &s);
  for (int i = 0; !ranks_left_behind(s.name); i++) {
    if (i > 60 * 1000) tiny_die("%s: rank 0 makes no file", s.what);
    ranks_pause(0.001);
  }
  ranks_kill(r, 0);
  ranks_wait(r, 0, s.what);
  if (!ranks_left_behind(s.name)) tiny_die("%s: this scene needs a file that is left", s.what);
  play(r, &s, 3, RM_OK, "", RM_OK, "");
}

// -------------------------------------------------------------------------------------- arguments
static void arguments(void) {
  rm_error err = RM_ERROR_INIT;
  rm_region *region;
  char longest[202];
  const rm_region_options options = {
      .world = 2, .n_groups = 1, .buffer_bytes = 64, .timeout = 0.05};
  memset(longest, 'x', 201);
  longest[201] = 0;
  const char *names[] = {"", "a/b", "a b", "\xC3\xA9", longest};
  for (int i = 0; i < 5; i++)
    if (rm_region_attach(names[i], 0, 1, &options, &region, &err) != RM_E_CONFIG)
      tiny_die("the name \"%s\" is taken", names[i]);
  if (rm_region_attach("x", 2, 1, &options, &region, &err) != RM_E_CONFIG)
    tiny_die("rank 2 of 2 is taken");
  if (rm_region_attach("x", -1, 1, &options, &region, &err) != RM_E_CONFIG)
    tiny_die("rank -1 is taken");
  longest[200] = 0;
  if (rm_region_attach(longest, 0, 1, &options, &region, &err) != RM_E_COLLECTIVE_TIMEOUT)
    tiny_die("a name of 200 is not taken");
  if (ranks_left_behind(longest)) tiny_die("the file of a lone rank 0 is still there");
  rm_error_clear(&err);
}

// The n-th allocation of a rank 0 that no rank joins fails, for every n: memory and file are
// released.
static void no_memory(void) {
  const rm_region_options options = {
      .world = 2, .n_groups = 1, .buffer_bytes = 64, .timeout = 0.02};
  for (long n = 1, failed = 1; failed; n++) {
    rm_error err = RM_ERROR_INIT;
    rm_region *region;
    char name[40];
    snprintf(name, sizeof name, "memory-%d", (int)getpid());
    rm_memory_fail_at(n, 1);
    const rm_code code = rm_region_attach(name, 0, 1, &options, &region, &err);
    failed = rm_memory_failed() > 0 && n < 3; // the third is the message's
    rm_memory_fail_at(0, 0);
    if (code != (failed ? RM_E_MEMORY : RM_E_COLLECTIVE_TIMEOUT) || region)
      tiny_die("allocation %ld: %s", n, rm_code_name(code));
    rm_error_clear(&err);
    if (rm_memory_blocks() || ranks_left_behind(name))
      tiny_die("allocation %ld: something was not given back", n);
  }
}

// Buffers larger than any machine's memory: the call that claims them fails, instead of a signal
// when they are written.
static void want_too_much(int rank, ranks_word *word, void *arg) {
  const scene *s = arg;
  const rm_region_options options = {
      .world = 2, .n_groups = 1, .buffer_bytes = (size_t)1 << 42, .timeout = s->timeout};
  const int32_t members[] = {0, 1};
  rm_region *region;
  rm_comm *comm;
  rm_error err = RM_ERROR_INIT;
  rm_code code = rm_region_attach(s->name, rank, 1, &options, &region, &err);
  if (!code) code = rm_region_comm(region, 0, members, 2, rank, &comm, &err);
  ranks_ended(word, code, &err);
}

static void no_room(ranks *r) {
  scene s = scene_of("buffers of 4 TiB", 2);
  ranks_start(r, 2, want_too_much, &s);
  for (int p = 0; p < 2; p++)
    if (ranks_wait(r, p, s.what) || r->words[p].code != RM_E_CAPACITY ||
        !strstr(r->words[p].text, "4398046511104 bytes"))
      fail(&s, "rank %d has %s: %s", p, &r->words[p]);
  if (ranks_left_behind(s.name)) tiny_die("%s: %s is still there", s.what, s.path);
}

int main(int argc, char **argv) {
  long rounds = 1;
  option_read(argc, argv,
              (option[]){{"rounds", .least = 1, .most = 1000, .count = &rounds},
                         {"plant", .most = 1, .count = &planted},
                         {0}});
  ranks r = ranks_make();
  for (long round = 0; round < rounds; round++) {
    arguments();
    no_memory();
    no_room(&r);
    ranks_that_differ(&r);
    ranks_that_go(&r);
    rank_that_stops(&r);
    files(&r);
    stale_files(&r);
    run_after_a_massacre(&r);
  }
  printf("mesh_attach: %d scenes\n", n_scenes);
  return 0;
}
