//! One element's pipeline.
//!
//! `v[c]` says that an iteration is in cycle `c`. A value is a wire in its cycle and a register in
//! each later cycle that uses it. `en` lets the pipeline move: every output of the last cycle has
//! gone or goes now, and no signal is being answered.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use beeline_ir::tree::{Binary, Unary, mask};
use beeline_passes::hardware::{Hardware, Memory, Stage};
use beeline_passes::ssa::{Access, Body, Op, ValueId};

use crate::name;

/// The text of an element's module.
#[must_use]
pub fn module(hardware: &Hardware, module_name: &str) -> String {
    let mut writer = Writer { hardware, text: String::new() };
    writer.all(module_name);
    writer.text
}

struct Writer<'a> {
    hardware: &'a Hardware,
    text: String,
}

fn range(bits: u32) -> String {
    if bits == 1 { String::new() } else { format!("[{}:0] ", bits - 1) }
}

fn literal(value: u64, bits: u32) -> String {
    format!("{bits}'h{:x}", value & mask(bits))
}

/// Names of a stage's values.
struct Names<'a> {
    stage: &'a Stage,
    /// `n` in the handler, `g` in the signal handler.
    letter: char,
    /// The last cycle in which each value is used.
    last: BTreeMap<ValueId, u32>,
}

impl Names<'_> {
    fn body(&self) -> &Body {
        &self.stage.body
    }

    fn cycle(&self, value: ValueId) -> u32 {
        self.stage.schedule.cycle[value.0 as usize]
    }

    /// The value in a cycle.
    fn at(&self, value: ValueId, cycle: u32) -> String {
        let bits = self.body().bits(value);
        if let Some(known) = self.body().constant_of(value) {
            return literal(known, bits);
        }
        if cycle <= self.cycle(value) {
            return format!("{}{}", self.letter, value.0);
        }
        format!("{}{}_{cycle}", self.letter, value.0)
    }

    /// Bits of the value in a cycle.
    fn slice(&self, value: ValueId, cycle: u32, offset: u32, bits: u32) -> String {
        let width = self.body().bits(value);
        if let Some(known) = self.body().constant_of(value) {
            return literal(known >> offset, bits);
        }
        let whole = self.at(value, cycle);
        if bits == width {
            return whole;
        }
        if bits == 1 {
            return format!("{whole}[{offset}]");
        }
        format!("{whole}[{}:{offset}]", offset + bits - 1)
    }
}

/// A write of a memory.
struct Written {
    /// Of the handler or the signal handler.
    letter: char,
    when: String,
    address: String,
    /// The bits, where not all of the entry is written.
    part: String,
    value: String,
}

impl Writer<'_> {
    fn line(&mut self, text: &str) {
        self.text.push_str(text);
        self.text.push('\n');
    }

    fn all(&mut self, module_name: &str) {
        let hardware = self.hardware;
        let element = &hardware.element;
        let mut ports = vec!["    input clk".to_owned(), "    input rst".to_owned()];
        for (at, port) in element.inputs.iter().enumerate() {
            ports.push(format!("    input {}in{at}_data", range(port.bits)));
            ports.push(format!("    input in{at}_valid"));
            ports.push(format!("    output in{at}_ready"));
        }
        for (at, port) in element.outputs.iter().enumerate() {
            ports.push(format!("    output {}out{at}_data", range(port.bits)));
            ports.push(format!("    output out{at}_valid"));
            ports.push(format!("    input out{at}_ready"));
        }
        ports.push("    input sig_valid".to_owned());
        ports.push("    input [511:0] sig_data".to_owned());
        ports.push("    output ans_valid".to_owned());
        ports.push("    output [511:0] ans_data".to_owned());
        let schedule = &hardware.handler.schedule;
        let depth = schedule.depth;
        self.line(&format!(
            "// {}: an iteration every {} cycles, {depth} cycles long.",
            hardware.name, schedule.interval
        ));
        self.line(&format!("module {module_name} ("));
        self.line(&ports.join(",\n"));
        self.line(");");
        self.states();
        let signal_depth = hardware.signal.as_ref().map_or(1, |stage| stage.schedule.depth);
        self.line(&format!("    reg [{}:0] vr;", depth.max(2) - 1));
        self.line("    reg [15:0] since;");
        self.line(&format!("    reg [{}:0] gr;", signal_depth.max(2) - 1));
        self.line("    wire done;");
        self.line("    wire empty = vr == 0;");
        self.line("    wire begins = sig_valid && gr == 0 && (empty || !done);");
        self.line("    wire answering = begins || gr != 0;");
        self.line("    wire en = done && !answering;");
        self.line("    wire issue = since == 0 && !sig_valid;");
        self.line(&format!(
            "    wire [{}:0] v = {{vr[{}:1], issue}};",
            depth.max(2) - 1,
            depth.max(2) - 1
        ));
        self.line(&format!(
            "    wire [{}:0] g = {{gr[{}:1], begins}};",
            signal_depth.max(2) - 1,
            signal_depth.max(2) - 1
        ));
        let handler =
            Names { stage: &hardware.handler, letter: 'n', last: uses(&hardware.handler) };
        self.memories();
        self.values(&handler, "en");
        let signal =
            hardware.signal.as_ref().map(|stage| Names { stage, letter: 'g', last: uses(stage) });
        if let Some(names) = &signal {
            self.values(names, "answering");
        }
        self.fetches(&handler);
        self.emits(&handler);
        self.accesses(&handler, signal.as_ref());
        self.control(&handler, signal.as_ref(), depth, signal_depth);
        self.line("endmodule");
    }

    fn states(&mut self) {
        for (at, state) in self.hardware.states.iter().enumerate() {
            let text = format!("    reg {}s{at}; // {}", range(state.bits), state.name);
            self.line(&text);
        }
    }

    fn memories(&mut self) {
        for (at, memory) in self.hardware.memories.iter().enumerate() {
            let accessed = |stage: &Stage| {
                stage.body.accesses.iter().any(|access| memory_of(&stage.body, *access) == at)
            };
            let used = accessed(&self.hardware.handler)
                || self.hardware.signal.as_ref().is_some_and(accessed);
            if !used {
                continue;
            }
            let mut text = format!(
                "    reg {}m{at} [0:{}]; // {}\n",
                range(memory.bits),
                memory.entries - 1,
                memory.name
            );
            // Counting logic does not need the zeros, and Yosys makes a cell of each.
            let zeros = memory.initial.iter().all(|word| *word == 0);
            if zeros {
                text.push_str("`ifndef NO_ZEROS\n");
            }
            text.push_str(&format!("    integer i{at};\n    initial begin\n"));
            let _ = writeln!(
                text,
                "        for (i{at} = 0; i{at} < {}; i{at} = i{at} + 1) m{at}[i{at}] = 0;",
                memory.entries
            );
            let per = beeline_ir::tree::words(memory.bits);
            for (entry, words) in memory.initial.chunks(per).enumerate() {
                if words.iter().any(|word| *word != 0) {
                    let _ =
                        writeln!(text, "        m{at}[{entry}] = {};", wide(words, memory.bits));
                }
            }
            text.push_str(if zeros { "    end\n`endif\n" } else { "    end\n" });
            self.text.push_str(&text);
        }
    }

    /// Wires of each value, and its registers in later cycles.
    fn values(&mut self, names: &Names<'_>, enable: &str) {
        let body = names.body();
        for at in 0..body.nodes.len() {
            let value = ValueId(u32::try_from(at).unwrap_or(u32::MAX));
            if body.constant_of(value).is_some() || !names.last.contains_key(&value) {
                continue;
            }
            let node = body.node(value);
            let expression = self.expression(names, value);
            let own = format!("{}{}", names.letter, value.0);
            let text = format!("    wire {}{own} = {expression};", range(node.bits));
            self.line(&text);
            let first = names.cycle(value);
            let last = names.last[&value];
            if last > first {
                let list: Vec<String> =
                    (first + 1..=last).map(|cycle| format!("{own}_{cycle}")).collect();
                let text = format!("    reg {}{};", range(node.bits), list.join(", "));
                self.line(&text);
                let mut text = format!("    always @(posedge clk) if ({enable}) begin");
                for cycle in first + 1..=last {
                    let before = names.at(value, cycle - 1);
                    let _ = write!(text, " {own}_{cycle} <= {before};");
                }
                text.push_str(" end");
                self.line(&text);
            }
        }
    }

    fn expression(&self, names: &Names<'_>, value: ValueId) -> String {
        let body = names.body();
        let node = body.node(value);
        let cycle = names.cycle(value);
        let of = |operand: ValueId| names.at(operand, cycle);
        match node.op {
            Op::Constant(known) => literal(known, node.bits),
            Op::State(id) => format!("s{}", id.0),
            Op::Fetched(port) => {
                let want = body.wants.iter().find(|(p, _)| *p == port);
                let want = want.map_or_else(|| "1'b0".to_owned(), |(_, want)| of(*want));
                format!("{want} && in{port}_valid")
            }
            Op::Item(port, word) => {
                part(&format!("in{port}_data"), self.in_bits(port), word, node.bits)
            }
            Op::Signal(word) => part("sig_data", 512, word, 64),
            Op::Data(read, word) => {
                let memory = body.reads[read.0 as usize].memory.0;
                let described = &self.hardware.memories[memory as usize];
                let source = if described.latency == 0 {
                    // A table in logic: a function of the address.
                    return self.table(names, value);
                } else {
                    format!("{}q{memory}_{}", names.letter, described.latency)
                };
                part(&source, described.bits, word, node.bits)
            }
            Op::Unary(Unary::Not, a) => format!("~{}", of(a)),
            Op::Unary(Unary::Negate, a) => format!("-{}", of(a)),
            Op::Binary(operator, a, b) => {
                let (x, y) = (of(a), of(b));
                let bits = body.bits(a);
                match operator {
                    Binary::Add => format!("{x} + {y}"),
                    Binary::Subtract => format!("{x} - {y}"),
                    Binary::Multiply => format!("{x} * {y}"),
                    Binary::Divide => {
                        format!("{y} == 0 ? {} : {x} / {y}", literal(u64::MAX, bits))
                    }
                    Binary::Remainder => format!("{y} == 0 ? {x} : {x} % {y}"),
                    Binary::And => format!("{x} & {y}"),
                    Binary::Or => format!("{x} | {y}"),
                    Binary::Xor => format!("{x} ^ {y}"),
                    Binary::ShiftLeft => format!("{x} << {y}"),
                    Binary::ShiftRight => format!("{x} >> {y}"),
                    Binary::Equal => format!("{x} == {y}"),
                    Binary::NotEqual => format!("{x} != {y}"),
                    Binary::Less => format!("{x} < {y}"),
                    Binary::LessEqual => format!("{x} <= {y}"),
                }
            }
            Op::Select(c, a, b) => format!("{} ? {} : {}", of(c), of(a), of(b)),
            Op::Resize(a) => {
                let width = body.bits(a);
                if width < node.bits {
                    format!("{{{}'b0, {}}}", node.bits - width, of(a))
                } else {
                    names.slice(a, cycle, 0, node.bits)
                }
            }
            Op::Extract(a, offset) => names.slice(a, cycle, offset, node.bits),
            Op::Insert(base, value, offset) => {
                let width = body.bits(value);
                let mut parts = Vec::new();
                let above = offset + width;
                if above < node.bits {
                    parts.push(names.slice(base, cycle, above, node.bits - above));
                }
                parts.push(of(value));
                if offset > 0 {
                    parts.push(names.slice(base, cycle, 0, offset));
                }
                format!("{{{}}}", parts.join(", "))
            }
        }
    }

    /// A word of a table in logic.
    fn table(&self, names: &Names<'_>, value: ValueId) -> String {
        let body = names.body();
        let Op::Data(read, word) = body.node(value).op else { return String::new() };
        let read = &body.reads[read.0 as usize];
        let memory = &self.hardware.memories[read.memory.0 as usize];
        let address = names.at(read.address, names.cycle(value));
        let entry = format!("m{}[{address}]", read.memory.0);
        if memory.bits <= 64 || word == 0 && body.bits(value) == memory.bits {
            return entry;
        }
        // An entry of a memory is sliced directly: Verilog-2005 allows it.
        let low = word * 64;
        format!("{entry}[{}:{low}]", low + body.bits(value) - 1)
    }

    fn in_bits(&self, port: u32) -> u32 {
        self.hardware.element.inputs[port as usize].bits
    }

    fn fetches(&mut self, names: &Names<'_>) {
        for port in 0..self.hardware.element.inputs.len() {
            let key = u32::try_from(port).unwrap_or(0);
            let found = names.body().wants.iter().find(|(p, _)| *p == key);
            let ready = match found {
                Some((_, want)) => {
                    let cycle = names.stage.schedule.fetch_cycle.get(&key).copied().unwrap_or(0);
                    format!("en && v[{cycle}] && {}", names.at(*want, cycle))
                }
                None => "1'b0".to_owned(),
            };
            self.line(&format!("    assign in{port}_ready = {ready};"));
        }
    }

    fn emits(&mut self, names: &Names<'_>) {
        let last = names.stage.schedule.emit_cycle;
        let mut done = Vec::new();
        for port in 0..self.hardware.element.outputs.len() {
            let emit = names.body().emits.iter().find(|emit| emit.port as usize == port);
            let Some(emit) = emit else {
                self.line(&format!("    assign out{port}_valid = 1'b0;"));
                self.line(&format!("    assign out{port}_data = 0;"));
                continue;
            };
            self.line(&format!("    reg sent{port};"));
            let when = names.at(emit.when, last);
            self.line(&format!("    wire has{port} = v[{last}] && {when};"));
            self.line(&format!("    assign out{port}_valid = has{port} && !sent{port};"));
            let words: Vec<String> =
                emit.words.iter().rev().map(|word| names.at(*word, last)).collect();
            self.line(&format!("    assign out{port}_data = {{{}}};", words.join(", ")));
            self.line("    always @(posedge clk)");
            self.line(&format!("        if (rst || en) sent{port} <= 1'b0;"));
            self.line(&format!(
                "        else if (out{port}_valid && out{port}_ready) sent{port} <= 1'b1;"
            ));
            done.push(format!("(!has{port} || sent{port} || out{port}_ready)"));
        }
        let done = if done.is_empty() { "1'b1".to_owned() } else { done.join(" && ") };
        self.line(&format!("    assign done = {done};"));
    }

    /// Memory ports.
    fn accesses(&mut self, handler: &Names<'_>, signal: Option<&Names<'_>>) {
        for (at, memory) in self.hardware.memories.iter().enumerate() {
            let mut writes: Vec<Written> = Vec::new();
            let mut reads = Vec::new();
            for (names, valid) in [(Some(handler), "v"), (signal, "g")] {
                let Some(names) = names else { continue };
                let body = names.body();
                let enable = if valid == "v" { "en" } else { "answering" };
                let mut address = String::new();
                for access in &body.accesses {
                    if memory_of(body, *access) != at {
                        continue;
                    }
                    match access {
                        Access::Read(id) => {
                            let cycle = names.stage.schedule.read_cycle[id.0 as usize];
                            let read = &body.reads[id.0 as usize];
                            let here = names.at(read.address, cycle);
                            address = if address.is_empty() {
                                here
                            } else {
                                format!("{valid}[{cycle}] ? {here} : {address}")
                            };
                        }
                        Access::Write(write) => {
                            let cycle = names.stage.schedule.write_cycle[*write];
                            let write = &body.writes[*write];
                            let words: Vec<String> =
                                write.words.iter().rev().map(|w| names.at(*w, cycle)).collect();
                            let part = if write.offset == 0 && write.bits == memory.bits {
                                String::new()
                            } else {
                                format!("[{}:{}]", write.offset + write.bits - 1, write.offset)
                            };
                            writes.push(Written {
                                letter: names.letter,
                                when: format!(
                                    "{enable} && {valid}[{cycle}] && {}",
                                    names.at(write.when, cycle)
                                ),
                                address: names.at(write.address, cycle),
                                part,
                                value: words.join(", "),
                            });
                        }
                    }
                }
                if !address.is_empty() && memory.latency > 0 {
                    reads.push((names.letter, enable, address));
                }
            }
            for (letter, enable, address) in reads {
                self.read_port(at, memory, (letter, enable), &address, &writes);
            }
            if !writes.is_empty() {
                self.line("    always @(posedge clk) begin");
                for Written { when, address, part, value, .. } in writes {
                    self.line(&format!(
                        "        if ({when}) m{at}[{address}]{part} <= {{{value}}};"
                    ));
                }
                self.line("    end");
            }
        }
    }

    /// The registers that a memory's data pass. Where a read sees a write of its own cycle, the
    /// written bits take the place of those read.
    fn read_port(
        &mut self,
        at: usize,
        memory: &Memory,
        (letter, enable): (char, &str),
        address: &str,
        writes: &[Written],
    ) {
        let list: Vec<String> =
            (1..=memory.latency).map(|k| format!("{letter}q{at}_{k}")).collect();
        self.line(&format!("    reg {}{};", range(memory.bits), list.join(", ")));
        self.line(&format!("    always @(posedge clk) if ({enable}) begin"));
        self.line(&format!("        {letter}q{at}_1 <= m{at}[{address}];"));
        for written in writes.iter().filter(|w| memory.transparent && w.letter == letter) {
            let Written { when, address: to, part, value, .. } = written;
            self.line(&format!(
                "        if ({when} && ({to}) == ({address})) {letter}q{at}_1{part} <= {{{value}}};"
            ));
        }
        for k in 2..=memory.latency {
            self.line(&format!("        {letter}q{at}_{k} <= {letter}q{at}_{};", k - 1));
        }
        self.line("    end");
    }

    fn control(
        &mut self,
        handler: &Names<'_>,
        signal: Option<&Names<'_>>,
        depth: u32,
        signal_depth: u32,
    ) {
        let interval = handler.stage.schedule.interval;
        let mut text = String::new();
        text.push_str("    always @(posedge clk)\n        if (rst) begin\n");
        text.push_str("            vr <= 0;\n            gr <= 0;\n            since <= 0;\n");
        for (at, state) in self.hardware.states.iter().enumerate() {
            let _ = writeln!(text, "            s{at} <= {};", literal(state.initial, state.bits));
        }
        text.push_str("        end else begin\n            if (en) begin\n");
        let _ = writeln!(text, "                vr <= {{v[{}:0], 1'b0}};", depth.max(2) - 2);
        let _ = writeln!(
            text,
            "                since <= issue ? 16'd{} : since == 0 ? 16'd0 : since - 16'd1;",
            interval - 1
        );
        for (state, value) in &handler.body().updates {
            let cycle = handler.stage.schedule.update_cycle.get(state).copied().unwrap_or(0);
            let value = handler.at(*value, cycle);
            let _ = writeln!(text, "                if (v[{cycle}]) s{} <= {value};", state.0);
        }
        text.push_str("            end\n            if (answering) begin\n");
        if signal_depth > 1 {
            let _ = writeln!(text, "                gr <= {{g[{}:0], 1'b0}};", signal_depth - 2);
        }
        if let Some(names) = signal {
            for (state, value) in &names.body().updates {
                let cycle = names.stage.schedule.update_cycle.get(state).copied().unwrap_or(0);
                let value = names.at(*value, cycle);
                let _ = writeln!(text, "                if (g[{cycle}]) s{} <= {value};", state.0);
            }
        }
        text.push_str("            end\n        end\n");
        self.text.push_str(&text);
        let last = signal_depth - 1;
        self.line(&format!("    assign ans_valid = answering && g[{last}];"));
        let answer = match signal {
            Some(names) if names.body().answer.len() == 8 => {
                let words: Vec<String> =
                    names.body().answer.iter().rev().map(|w| names.at(*w, last)).collect();
                format!("{{{}}}", words.join(", "))
            }
            _ => "sig_data".to_owned(),
        };
        self.line(&format!("    assign ans_data = {answer};"));
    }
}

fn memory_of(body: &Body, access: Access) -> usize {
    match access {
        Access::Read(id) => body.reads[id.0 as usize].memory.0 as usize,
        Access::Write(at) => body.writes[at].memory.0 as usize,
    }
}

/// A word of a wide net.
fn part(net: &str, total: u32, word: u32, bits: u32) -> String {
    let low = word * 64;
    if low == 0 && bits == total {
        return net.to_owned();
    }
    if bits == 1 {
        return format!("{net}[{low}]");
    }
    format!("{net}[{}:{low}]", low + bits - 1)
}

/// A constant of several words.
fn wide(words: &[u64], bits: u32) -> String {
    let mut digits = String::new();
    for word in words.iter().rev() {
        let _ = write!(digits, "{word:016x}");
    }
    let short = digits.trim_start_matches('0');
    format!("{bits}'h{}", if short.is_empty() { "0" } else { short })
}

/// The last cycle in which each value is used; values that nothing uses are absent.
fn uses(stage: &Stage) -> BTreeMap<ValueId, u32> {
    let body = &stage.body;
    let schedule = &stage.schedule;
    let mut last: BTreeMap<ValueId, u32> = BTreeMap::new();
    let mut stack: Vec<(ValueId, u32)> = Vec::new();
    for (port, want) in &body.wants {
        stack.push((*want, schedule.fetch_cycle.get(port).copied().unwrap_or(0)));
    }
    for access in &body.accesses {
        match access {
            Access::Read(id) => {
                let read = &body.reads[id.0 as usize];
                stack.push((read.address, schedule.read_cycle[id.0 as usize]));
            }
            Access::Write(at) => {
                let write = &body.writes[*at];
                let cycle = schedule.write_cycle[*at];
                stack.push((write.address, cycle));
                stack.push((write.when, cycle));
                stack.extend(write.words.iter().map(|word| (*word, cycle)));
            }
        }
    }
    for (state, value) in &body.updates {
        stack.push((*value, schedule.update_cycle.get(state).copied().unwrap_or(0)));
    }
    for emit in &body.emits {
        stack.push((emit.when, schedule.emit_cycle));
        stack.extend(emit.words.iter().map(|word| (*word, schedule.emit_cycle)));
    }
    let end = schedule.depth - 1;
    stack.extend(body.answer.iter().map(|word| (*word, end)));
    while let Some((value, cycle)) = stack.pop() {
        if body.constant_of(value).is_some() {
            continue;
        }
        let own = schedule.cycle[value.0 as usize];
        let seen = last.get(&value).copied();
        if seen.is_some_and(|seen| seen >= cycle) {
            continue;
        }
        last.insert(value, cycle.max(own));
        if seen.is_none() {
            match body.node(value).op {
                // A table's address is used where its data are; a memory's was counted above.
                Op::Data(read, _) => {
                    let read = &body.reads[read.0 as usize];
                    stack.push((read.address, own));
                }
                Op::Fetched(port) => {
                    if let Some((_, want)) = body.wants.iter().find(|(p, _)| *p == port) {
                        stack.push((*want, own));
                    }
                }
                _ => stack.extend(body.operands(value).into_iter().map(|o| (o, own))),
            }
        }
    }
    last
}

/// The module name of a node.
#[must_use]
pub fn module_name(node: &str) -> String {
    format!("e_{}", name(node))
}
