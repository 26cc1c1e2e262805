#include "src/trace/chrome.h"

#include <algorithm>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <fstream>
#include <mutex>
#include <set>
#include <string_view>

#include "src/base/text.h"

namespace penstock::trace {

namespace {

std::string quoted(std::string_view text) {
  std::string out = "\"";
  for (const char letter : text) {
    if (letter == '"' || letter == '\\') out += '\\';
    if (static_cast<unsigned char>(letter) >= 0x20) out += letter;
  }
  return out + "\"";
}

std::string micros(int64_t ns) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%lld.%03d", static_cast<long long>(ns / 1000),
                static_cast<int>(ns % 1000));
  return text.data();
}

class JsonWriter {
 public:
  JsonWriter(const About& of, const Predicted& predicted) : of_(of), predicted_(predicted) {}

  void name(const char* what, int row, const std::string& text) {
    object("M", what, row);
    out_ += concat(",\"args\":{\"name\":", quoted(text), "}}");
  }
  void order(const char* what, int row, int index) {
    object("M", what, row);
    out_ += concat(",\"args\":{\"sort_index\":", index, "}}");
  }

  void slice(const Event& event) {
    object("X", *event.text, event.row);
    out_ +=
        concat(",\"ts\":", at(event.begin_ns), ",\"dur\":", micros(event.end_ns - event.begin_ns),
               ",\"cat\":\"", name_of(event.kind), "\"", args(event), "}");
  }

  // Writes an asynchronous slice, since several slices of a row may overlap.
  void async(const Event& event, size_t id) {
    for (const char* phase : {"b", "e"}) {
      const bool begins = *phase == 'b';
      object(phase, *event.text, event.row);
      out_ += concat(",\"ts\":", at(begins ? event.begin_ns : event.end_ns), ",\"cat\":\"",
                     name_of(event.kind), "\",\"id\":\"", of_.rank, ".", id, "\"",
                     begins ? args(event) : "", "}");
    }
  }

  // Begins an arrow at the end of a line, or ends it at the end of a wait. Viewers attach an arrow
  // to the slice that contains its timestamp, so each end lies 1 ns inside its slice.
  void arrow(const Event& event, bool begins) {
    object(begins ? "s" : "f", "done", event.row);
    out_ += concat(",\"ts\":", at(std::max(event.begin_ns, event.end_ns - 1)),
                   ",\"cat\":\"done\",\"id\":\"", of_.rank, ".", event.flow, "\"",
                   begins ? "" : ",\"bp\":\"e\"", "}");
  }

  std::string take() { return std::move(out_); }

 private:
  std::string at(int64_t ns) const { return micros(ns + of_.offset_ns.load()); }

  void object(const char* phase, std::string_view name, int row) {
    out_ += concat(out_.empty() ? "" : ",\n", "{\"ph\":\"", phase, "\",\"name\":", quoted(name),
                   ",\"pid\":", of_.rank, ",\"tid\":", row);
  }

  std::string args(const Event& event) const {
    std::string text = concat(",\"args\":{\"step\":", event.step);
    if (event.bytes > 0) {
      text += concat(",\"bytes\":", event.bytes);
      const int64_t ns = event.end_ns - event.begin_ns;
      if (ns > 0) {
        text += concat(",\"GB/s\":", static_cast<double>(event.bytes) / static_cast<double>(ns));
      }
    }
    if (event.kind == Kind::kLine || event.kind == Kind::kCompute) {
      const auto found = predicted_.find(*event.text);
      if (found != predicted_.end()) text += concat(",\"predicted_ms\":", found->second * 1e3);
    }
    return text + "}";
  }

  const About& of_;
  const Predicted& predicted_;
  std::string out_;
};

bool overlaps(const Event& event) {
  return event.kind == Kind::kRead || event.kind == Kind::kWrite;
}

}  // namespace

std::string chrome_events(const Recorder& of, const std::vector<Event>& events,
                          const Predicted& predicted) {
  const About& about = of.about;
  JsonWriter writer(about, predicted);
  const std::string host = about.host.empty() ? "" : " on " + about.host;
  writer.name("process_name", 0, concat("rank ", about.rank, host));
  writer.order("process_sort_index", 0, about.rank);
  const std::vector<std::string> rows = of.rows();
  for (size_t row = 0; row < rows.size(); ++row) {
    writer.name("thread_name", static_cast<int>(row), rows[row]);
    writer.order("thread_sort_index", static_cast<int>(row), static_cast<int>(row));
  }
  // Arrows are written only for lines that some row waited for.
  std::set<uint64_t> waited;
  for (const Event& event : events) {
    if (event.kind == Kind::kWait) waited.insert(event.flow);
  }
  for (size_t i = 0; i < events.size(); ++i) {
    const Event& event = events[i];
    if (overlaps(event)) {
      writer.async(event, i);
      continue;
    }
    writer.slice(event);
    if (event.flow == 0 || !waited.contains(event.flow)) continue;
    if (event.kind == Kind::kLine || event.kind == Kind::kWait) {
      writer.arrow(event, event.kind == Kind::kLine);
    }
  }
  return writer.take();
}

std::string chrome_trace(const std::vector<std::string>& parts, const std::string& metadata) {
  std::vector<std::string> some;
  for (const std::string& part : parts) {
    if (!part.empty()) some.push_back(part);
  }
  return concat("{\"traceEvents\":[\n", join(some, ",\n"),
                "\n],\"displayTimeUnit\":\"ms\",\"otherData\":", metadata, "}\n");
}

std::string dump(const Recorder& of) {
  if (!of.on() || of.about.folder.empty()) return "";
  static std::mutex mutex;  // several lanes may fail at once
  const std::lock_guard lock(mutex);
  const std::string path =
      concat(of.about.folder, "/penstock-rank", of.about.rank, "-pid", getpid(), ".trace.json");
  std::ofstream file(path);
  file << chrome_trace({chrome_events(of, of.last())}, "{}");
  file.close();
  return concat("; ", file ? "the last steps are in " : "no timeline could be written to ", path);
}

}  // namespace penstock::trace
