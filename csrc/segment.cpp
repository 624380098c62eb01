#include "segment.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

namespace pat {
namespace {

constexpr uint64_t kMagic = 0x7061745f73686d32ULL;  // "pat_shm2"
constexpr const char* kNamePrefix = "/sglang_pat_";
constexpr const char* kStoreKey = "pat_shm/segment";

size_t align_up(size_t n, size_t a) { return (n + a - 1) / a * a; }

[[noreturn]] void fail(const std::string& who, const std::string& what) {
  C10_THROW_ERROR(DistBackendError, who + ": " + what);
}

struct Stat {
  char state = '?';  // 0: no such process; '?': could not be read (out of file descriptors, say)
  uint64_t start_ticks = 0;
};

Stat read_stat(int pid) {
  char path[64], text[1024];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  const int fd = ::open(path, O_RDONLY | O_CLOEXEC);
  Stat out;
  if (fd < 0) {
    if (errno == ENOENT || errno == ESRCH) out.state = 0;
    return out;
  }
  const ssize_t n = read(fd, text, sizeof text - 1);
  const bool gone = n < 0 && errno == ESRCH;
  close(fd);
  if (gone) out.state = 0;
  if (n <= 0) return out;
  text[n] = 0;
  const char* p = strrchr(text, ')');  // the command name may hold anything, also blanks and brackets
  if (p == nullptr || p[1] == 0) return out;
  out.state = p[2];
  p += 2;
  for (int field = 3; field < 22 && p != nullptr; ++field) {  // 22 is starttime
    p = strchr(p, ' ');
    if (p != nullptr) ++p;
  }
  if (p != nullptr) out.start_ticks = strtoull(p, nullptr, 10);
  return out;
}

Process this_process() {
  struct stat st {};
  const bool known = stat("/proc/self/ns/pid", &st) == 0;
  return {int32_t(getpid()), read_stat(getpid()).start_ticks, known ? uint64_t(st.st_ino) : 0};
}

bool is_gone(const Process& p, uint64_t my_pid_ns) {
  if (p.pid_ns != my_pid_ns) return false;
  const Stat s = read_stat(p.pid);
  if (s.state == '?') return false;
  return s.state == 0 || s.state == 'Z' || s.state == 'X' || s.start_ticks != p.start_ticks;
}

// Removes names whose creator was killed before all ranks had mapped the segment.
void sweep_stale_names() {
  DIR* dir = opendir("/dev/shm");
  if (dir == nullptr) return;
  const uint64_t my_pid_ns = this_process().pid_ns;
  while (const dirent* entry = readdir(dir)) {
    if (strncmp(entry->d_name, kNamePrefix + 1, strlen(kNamePrefix) - 1) != 0) continue;
    const std::string name = std::string("/") + entry->d_name;
    const int fd = shm_open(name.c_str(), O_RDONLY | O_CLOEXEC, 0);
    if (fd < 0) continue;
    alignas(Header) char raw[sizeof(Header)];
    const bool whole = pread(fd, raw, sizeof raw, 0) == ssize_t(sizeof raw);
    close(fd);
    const auto* h = reinterpret_cast<const Header*>(raw);
    if (whole && h->magic == kMagic && is_gone(h->creator, my_pid_ns)) shm_unlink(name.c_str());
  }
  closedir(dir);
}

}  // namespace

void Segment::layout(size_t chunk) {
  const size_t n = size_t(size_);
  size_t at = 0;
  auto place = [&](size_t bytes, size_t align) {
    at = align_up(at, align);
    const size_t here = at;
    at += bytes;
    return here;
  };
  place(sizeof(Header), 4096);
  off_peers_ = place(n * sizeof(Peer), 128);
  off_lines_ = place(n * sizeof(RankLine), 4096);
  off_bells_ = place(n * sizeof(Doorbell), 128);
  off_counts_ = place(n * 2 * n * sizeof(int64_t), 128);
  off_channels_ = place(n * n * sizeof(Channel), 4096);
  off_staging_ = place(n * 2 * chunk, 4096);
  chunk_ = chunk;
  bytes_ = align_up(at, 4096);
}

Segment::Segment(c10d::Store& store, int rank, int size, int global_rank, const Link& link,
                 std::chrono::milliseconds timeout, const std::string& who)
    : rank_(rank), size_(size) {
  rank == 0 ? create(store, who) : open(store, who);

  Peer& me = peer(rank);
  me.process = this_process();
  me.global_rank = global_rank;
  me.link_latency_ns = link.latency_ns;
  me.link_bytes_per_ns = link.bytes_per_ns;
  CPU_ZERO(&me.cpus);
  sched_getaffinity(0, sizeof me.cpus, &me.cpus);
  header().mapped.fetch_add(1, std::memory_order_acq_rel);

  // Group creation is rare and the others may be far behind, so this waits by sleeping.
  const int64_t deadline = now_ns() + timeout.count() * 1'000'000LL;
  auto arrived = [&] {
    return rank == 0 ? header().mapped.load(std::memory_order_acquire) == uint32_t(size)
                     : header().ready.load(std::memory_order_acquire) != 0;
  };
  while (!arrived()) {
    if (now_ns() > deadline) {
      const auto n = header().mapped.load();
      if (!name_.empty()) shm_unlink(name_.c_str());
      munmap(base_, bytes_);
      base_ = nullptr;
      fail(who, "only " + std::to_string(n) + " of " + std::to_string(size) + " ranks joined within the timeout of " +
                    std::to_string(timeout.count()) + " ms");
    }
    usleep(200);
  }
  if (rank == 0) {
    shm_unlink(name_.c_str());
    name_.clear();
    try {
      store.deleteKey(kStoreKey);
    } catch (const std::exception&) {
      // Not every store can delete; a stale entry names a segment that no longer exists and is refused by open().
    }
    header().ready.store(1, std::memory_order_release);
  }
  cpu_set_t all;
  CPU_ZERO(&all);
  for (int r = 0; r < size; ++r) CPU_OR(&all, &all, &peer(r).cpus);
  cores_ = std::max(1, CPU_COUNT(&all));
}

Segment::~Segment() {
  if (!name_.empty()) shm_unlink(name_.c_str());
  if (base_ != nullptr) munmap(base_, bytes_);
}

void Segment::create(c10d::Store& store, const std::string& who) {
  // Pages are taken lazily, but running out of them later would be a SIGBUS, so look before.
  struct statvfs fs {};
  const bool known = statvfs("/dev/shm", &fs) == 0;
  const size_t free_bytes = known ? size_t(fs.f_bavail) * fs.f_frsize : SIZE_MAX;
  sweep_stale_names();
  layout(kChunkBytes);
  while (bytes_ > free_bytes / 2 && chunk_ > kMinChunkBytes) layout(chunk_ / 2);
  if (bytes_ > free_bytes) {
    fail(who, "the segment of " + std::to_string(size_) + " ranks needs " + std::to_string(bytes_) +
                  " bytes, /dev/shm has " + std::to_string(free_bytes) + " free; enlarge it (docker: --shm-size)");
  }
  int fd = -1;
  for (int attempt = 0; attempt < 16 && fd < 0; ++attempt) {
    uint64_t random[2];
    if (getrandom(random, sizeof random, 0) != ssize_t(sizeof random)) fail(who, "getrandom failed");
    char text[64];
    snprintf(text, sizeof text, "%s%016llx", kNamePrefix, static_cast<unsigned long long>(random[0]));
    fd = shm_open(text, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0 && errno != EEXIST) fail(who, std::string("shm_open failed: ") + strerror(errno));
    name_ = fd < 0 ? "" : text;
    token_ = random[1];
  }
  if (fd < 0) fail(who, "found no free shared-memory name");
  try {
    if (ftruncate(fd, off_t(bytes_)) != 0) fail(who, std::string("ftruncate failed: ") + strerror(errno));
    map(fd, who);
    Header& h = header();
    h.token = token_;
    h.bytes = bytes_;
    h.chunk = chunk_;
    h.ranks = uint32_t(size_);
    h.creator = this_process();
    std::atomic_thread_fence(std::memory_order_release);
    h.magic = kMagic;
    store.set(kStoreKey, name_ + " " + std::to_string(token_) + " " + std::to_string(chunk_));
  } catch (...) {
    close(fd);
    shm_unlink(name_.c_str());
    if (base_ != nullptr) munmap(base_, bytes_);
    throw;
  }
  close(fd);
}

void Segment::open(c10d::Store& store, const std::string& who) {
  const std::vector<uint8_t> raw = store.get(kStoreKey);  // blocks until rank 0 has set it
  const std::string text(raw.begin(), raw.end());
  char name[64];
  unsigned long long token = 0, chunk = 0;
  if (sscanf(text.c_str(), "%63s %llu %llu", name, &token, &chunk) != 3) fail(who, "bad store entry '" + text + "'");
  layout(chunk);
  const int fd = shm_open(name, O_RDWR | O_CLOEXEC, 0);
  if (fd < 0) {
    fail(who, std::string("cannot open the segment ") + name + " that group rank 0 made: " + strerror(errno) +
                  "; all ranks must be on one node and share /dev/shm, and a store must not be reused after a crash");
  }
  struct stat st {};
  const bool fits = fstat(fd, &st) == 0 && size_t(st.st_size) == bytes_;
  if (fits) map(fd, who);
  close(fd);
  const bool ours = fits && header().magic == kMagic && header().token == token && header().ranks == uint32_t(size_);
  if (!ours) {
    if (base_ != nullptr) munmap(base_, bytes_);
    fail(who, std::string("the segment ") + name + " is not the one that group rank 0 made");
  }
}

void Segment::map(int fd, const std::string& who) {
  void* p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (p == MAP_FAILED) fail(who, std::string("mmap failed: ") + strerror(errno));
  base_ = static_cast<char*>(p);
  peers_ = reinterpret_cast<Peer*>(base_ + off_peers_);
  lines_ = reinterpret_cast<RankLine*>(base_ + off_lines_);
  bells_ = reinterpret_cast<Doorbell*>(base_ + off_bells_);
  counts_ = reinterpret_cast<int64_t*>(base_ + off_counts_);
  channels_ = reinterpret_cast<Channel*>(base_ + off_channels_);
  staging_ = base_ + off_staging_;
}

bool Segment::owned_by_this_process() const { return peer(rank_).process.pid == int32_t(getpid()); }

bool Segment::is_dead(int r) const { return is_gone(peer(r).process, peer(rank_).process.pid_ns); }

}  // namespace pat
