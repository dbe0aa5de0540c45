// simt_queue.cpp: see simt_inside.h. Enqueued work runs on a thread that waits for it.
#include "simt_inside.h"

#include <chrono>
#include <cstring>
#include <unistd.h>

namespace simt_inside {

// Returns whether the work has finished.
static bool do_work(simt_stream *s, work &w) {
  if (w.launch) {
    if (++s->n_launches == s->fault_at) devices[s->owner].sticky = cudaErrorIllegalAddress;
    else simt_run(*w.launch);
    return true;
  }
  if (w.run) {
    simt_doing("an exchange");
    return w.run(w.data.data());
  }
  simt_doing(w.from ? "cudaMemcpyAsync" : "cudaMemsetAsync");
  for (const char *at : {static_cast<const char *>(w.to), w.from}) {
    const block *b = at ? block_of(at) : nullptr;
    if (b && (b->owner == s->owner || (w.is_peers && b->owner != HOST)) && w.bytes)
      open_chunks(*b, at, at + w.bytes);
  }
  if (w.from) memcpy(w.to, w.from, w.bytes);
  else memset(w.to, w.value, w.bytes);
  if (w.is_peers) close_all(); // to the kernels behind it
  return true;
}

// Returns whether the other stream has reached this place; a destroyed stream was drained.
static bool await(simt_stream *s, const work &w) {
  if (!streams.count(w.awaited)) return true;
  const uint64_t place = std::min(w.place, w.awaited->n_enqueued);
  drains = HOST;
  close_all();
  simt_end();
  drain(w.awaited, place);
  simt_begin();
  drains = s->owner;
  return w.awaited->n_done >= place;
}

void drain(simt_stream *s, uint64_t place, work *now) {
  const device &d = devices[s->owner];
  if (d.sticky == cudaSuccess && (s->n_done < place || now)) {
    simt_begin();
    drains = s->owner;
    for (; s->n_done < place && d.sticky == cudaSuccess; s->n_done++) {
      work &w = s->queue.front();
      if (!(w.awaited ? await(s, w) : do_work(s, w))) break;
      s->queue.pop_front();
    }
    if (now && s->n_done >= place && d.sticky == cudaSuccess) do_work(s, *now);
    drains = HOST;
    close_all();
    for (const auto &[data, b] : blocks)
      if (b.owner == HOST) check_slack(b);
    simt_end();
  }
  if (d.sticky == cudaSuccess) return;
  s->queue.clear();
  s->n_done = s->n_enqueued;
}

void drain_whole(simt_stream *s, uint64_t place, locked &hold, work *now) {
  for (drain(s, place, now); s->n_done < place; drain(s, place, now)) {
    hold.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    hold.lock();
  }
}

void drain_device(int owner, locked &hold) {
  const auto is_due = [owner](const simt_stream *s) {
    return s->owner == owner && s->n_done < s->n_enqueued;
  };
  for (auto s = streams.begin();
       (s = std::find_if(streams.begin(), streams.end(), is_due)) != streams.end();) {
    drain(*s, (*s)->n_enqueued);
    if (!is_due(*s)) continue;
    hold.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    hold.lock();
  }
}

cudaError_t enqueue(simt_stream *s, work w) {
  if (devices[s->owner].sticky != cudaSuccess) return devices[s->owner].sticky;
  if (s->capture) {
    s->is_invalid |= ++s->n_captured == s->spoil_at;
    if (s->is_invalid) return cudaErrorStreamCaptureInvalidated;
    s->capture->push_back(std::move(w));
    return cudaSuccess;
  }
  const bool is_others = w.run;
  s->queue.push_back(std::move(w));
  s->n_enqueued++;
  if (is_others) s->behind_others = s->n_enqueued;
  if (from_environment("ROLLMESH_SIMT_EAGER", 0)) drain(s, s->n_enqueued);
  return cudaSuccess;
}

// Another rank may wait for an exchange that is in a queue here, while this rank's thread waits for
// something else. A background thread runs the work up to and including the last exchange of each
// queue, a little later than a GPU would.
namespace {
struct helper {
  std::thread *thread; // NULL until it is needed
  pid_t process; // whose it is: a forked child has none
  std::atomic<bool> is_over;

  void work() {
    while (!is_over) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      const locked hold(lock);
      for (simt_stream *s : streams)
        if (s->n_done < s->behind_others) drain(s, s->behind_others);
    }
  }
  void begin() {
    if (thread && process == getpid()) return;
    process = getpid();
    thread = new std::thread([this] { work(); });
  }
  ~helper() {
    is_over = true;
    if (thread && process == getpid()) thread->join();
  }
} others_helper;
} // namespace

void begin_helper() { others_helper.begin(); }

} // namespace simt_inside
