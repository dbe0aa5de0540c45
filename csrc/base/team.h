// team.h: a fixed pool of threads that run one function together. The thread that calls rm_team_run
// is thread 0; the n−1 workers spin for microseconds and then sleep on a futex. All threads use the
// contract's floating-point environment; rm_team_run restores the caller's when it returns. One
// thread at a time may call it. In a forked child the caller runs every thread's part on its own.
#pragma once

#include "base/status.h"
#include "kernels.h"

enum { RM_MAX_THREADS = 256 };
typedef struct rm_team rm_team;

// 1 ≤ n_threads ≤ RM_MAX_THREADS.
rm_code rm_team_create(int n_threads, rm_team **out, rm_error *err);
void rm_team_destroy(rm_team *team); // safe on NULL
int rm_team_threads(const rm_team *team);
void rm_team_run(void *team, rm_task_fn fn, void *arg); // fits rm_ctx.run
// memcpy by all threads of the context.
void rm_copy_block(char *to, const char *from, size_t bytes, const rm_ctx *ctx);
