// second_line.c: tests guards that other tests cannot reach, because an earlier guard catches the
// error. The Python layer refuses a version that does not grow before the store does, and a commit
// empties the prefix index before a page of an old version could be found. Also, a worker of a
// thread team has the floating-point mode of the contract, whatever mode the starting thread had; a
// forward of a tiny model would rarely show a difference. Exit status 1 and a message if one of
// these does not hold.
#include <stdio.h>
#include <string.h>
#include <xmmintrin.h>

#include "base/team.h"
#include "common/option.h"
#include "common/tiny.h"
#include "scheduler/kv_cache.h"

enum { PAGE = 16, N_PAGES = 4 };

static void must(int holds, const char *what) {
  if (!holds) tiny_die("%s", what);
}

// The same tokens under two versions are two pages; a page that was written is zeroed before it is
// handed out again.
static void prefix_index(void) {
  rm_kv_cache *cache = NULL;
  rm_error err = RM_ERROR_INIT;
  int32_t tokens[PAGE] = {5, 6, 7};
  const rm_kv_options options = {.n_pages = N_PAGES, .page_size = PAGE};
  tiny_must(rm_kv_create(&options, &cache, &err), &err);
  const int32_t page = rm_kv_alloc(cache);
  rm_kv_index(cache, page, 1, -1, tokens, 0);
  must(rm_kv_find(cache, 2, -1, tokens, 0) == -1, "a page of version 1 was found under version 2");
  must(rm_kv_find(cache, 1, -1, tokens, 0) == page, "a page was not found under its own version");
  rm_kv_release(cache, page);
  rm_kv_release(cache, page);
  rm_kv_reset(cache);
  int32_t held[N_PAGES];
  int64_t n;
  rm_kv_take_writes(cache, &n);
  for (int i = 0; i < N_PAGES; i++) held[i] = rm_kv_alloc(cache);
  const rm_page_write *write = rm_kv_take_writes(cache, &n);
  must(n == 1 && write->to == page && write->from < 0,
       "a page that had been in use was handed out as it was");
  for (int i = 0; i < N_PAGES; i++) rm_kv_release(cache, held[i]);
  rm_kv_destroy(cache);
}

static void versions_grow(void) {
  tiny_model *model = tiny_model_create(TINY_DENSE, RM_F32);
  tiny_weights *weights = tiny_weights_create(model, 1);
  rm_engine *engine = tiny_engine(model, 1);
  rm_error err = RM_ERROR_INIT;
  rm_sync_options options = {.version = 7};
  tiny_must(tiny_sync_with(engine, weights, &options, RM_INFLIGHT_REFUSE, &err), &err);
  for (int64_t version = 6; version <= 7; version++) {
    options.version = version;
    must(tiny_sync_with(engine, weights, &options, RM_INFLIGHT_REFUSE, &err) == RM_E_VERSION,
         "version 7 was followed by 6 or 7");
  }
  rm_engine_destroy(engine);
  tiny_weights_destroy(weights);
  tiny_model_destroy(model);
}

// MXCSR without its sticky flags, of each thread of a team that was made by a thread that rounds
// up.
static void record_mode(void *arg, int thread, int n_threads) {
  (void)n_threads;
  ((unsigned *)arg)[thread] = _mm_getcsr() & ~0x3fu;
}

static void workers_have_the_mode(void) {
  enum {
    N = 3,
    DEFAULT = 0x1f80,
    ROUND_UP = 0x4000,
    FLUSH_TO_ZERO = 0x8000,
    DENORMALS_ARE_ZERO = 0x0040
  };
  unsigned modes[N] = {0};
  rm_team *team = NULL;
  rm_error err = RM_ERROR_INIT;
  _mm_setcsr(DEFAULT | ROUND_UP);
  tiny_must(rm_team_create(N, &team, &err), &err);
  rm_team_run(team, record_mode, modes);
  must((_mm_getcsr() & ~0x3fu) == (DEFAULT | ROUND_UP),
       "a run of the team changed the caller's floating-point mode");
  _mm_setcsr(DEFAULT);
  rm_team_destroy(team);
  for (int i = 0; i < N; i++)
    must(modes[i] == (DEFAULT | FLUSH_TO_ZERO | DENORMALS_ARE_ZERO),
         "a thread of a team computed in the mode of who made it");
}

int main(int argc, char **argv) {
  option_read(argc, argv, (option[]){{0}});
  prefix_index();
  versions_grow();
  workers_have_the_mode();
  puts("3 guards hold");
}
