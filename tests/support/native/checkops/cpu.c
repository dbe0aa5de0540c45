// cpu.c: see device.h: the variants of the CPU, with one and with two threads.
#include <inttypes.h>
#include <stdio.h>

#include "base/team.h"
#include "device.h"

enum { THREAD_COUNTS = 2 };

const device check_device = {.n_settings = THREAD_COUNTS};

static rm_team *team;
static int64_t team_runs; // how often an op used a second thread

int device_variants(variant *out) {
  for (rm_isa isa = RM_ISA_REF; isa < RM_N_ISA; isa++)
    out[isa] = (variant){.name = rm_isa_name(isa),
                         .table = rm_kernels_for(isa),
                         .reference = rm_kernels_for(RM_ISA_REF),
                         .refused = rm_isa_ask(isa).refused,
                         .is_emulated = rm_isa_ask(isa).emulated};
  return RM_N_ISA;
}

int device_open(void) {
  rm_error err = RM_ERROR_INIT;
  if (!rm_kernels_for(RM_ISA_REF)) {
    printf("the reference needs a processor with FMA\n");
    return 3;
  }
  if (!rm_team_create(THREAD_COUNTS, &team, &err)) return 0;
  fprintf(stderr, "checkops: %s\n", rm_error_message(&err));
  rm_error_clear(&err);
  return 2;
}

void device_close(void) { rm_team_destroy(team); }

static void run_team(void *arg, rm_task_fn fn, void *task) {
  team_runs++;
  rm_team_run(arg, fn, task);
}

const char *device_set(rm_ctx *ctx, int setting) {
  ctx->n_threads = setting + 1;
  ctx->run = setting ? run_team : NULL;
  ctx->team = team;
  return setting ? "2 threads" : "1 thread";
}

void device_wait(void) {}
void *device_memory(size_t bytes) {
  (void)bytes;
  return NULL;
}

const char *device_summary(void) {
  static char text[80];
  snprintf(text, sizeof text, "at 1 and 2 threads (woken %" PRId64 " times)", team_runs);
  return text;
}

int device_measure(int setting, machine *out) {
  *out = measure_machine(team, setting + 1);
  return 0;
}
