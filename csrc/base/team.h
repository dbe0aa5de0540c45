// team.h: a fixed pool of threads that run one function together. The thread that calls rm_team_run
// is thread 0; the n−1 workers spin for microseconds and then sleep on a futex. All run with the
// contract's floating-point environment; the caller's is restored afterwards. One rm_team_run at a
// time. In a forked child the caller runs alone.
#pragma once

#include "base/status.h"
#include "kernels.h"

enum { RM_MAX_THREADS = 256 };
typedef struct rm_team rm_team;

rm_code rm_team_create(int n_threads, rm_team **out,
                       rm_error *err); // 1 ≤ n_threads ≤ RM_MAX_THREADS
void rm_team_destroy(rm_team *team); // safe on NULL
int rm_team_threads(const rm_team *team);
void rm_team_run(void *team, rm_task_fn fn, void *arg); // fits rm_ctx.run
