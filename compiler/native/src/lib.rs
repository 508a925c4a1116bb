//! Machine code for elements, by Cranelift.
//!
//! Place: `compiler`, a back end. Cranelift because it is a library, compiles an element in
//! milliseconds, has no C compiler behind it, and checks its own input; LLVM would give faster code
//! for far more build time.
//!
//! [`Program::compile`] turns each node of a graph into functions over a [`Frame`]: the same layout
//! that the interpreter uses. [`NativeMachine`] runs them under the reference's kernel loop, or runs
//! rounds over the whole graph by one call (see `fused`).
//!
//! Invariants: a function reads and writes its frame's words, its memories' words and, in the
//! kernel, the rings it is lent; every access is inside them, because offsets are constants of the
//! layout and indices are compared with their arrays' sizes.

mod code;
mod fold;
mod fused;
mod ring;
mod uses;

use std::sync::Arc;

use beeline_ir::graph::Graph;
use beeline_ir::interpreter::{Endless, Event, Frame};
use beeline_ir::run::{Machine, Moved, Whole};
use beeline_ir::tree::Element;
use cranelift_codegen::settings::{self, Configurable as _};
use cranelift_jit::{JITBuilder, JITModule};

use fold::fold;

/// Machine code could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NativeError {
    /// This processor.
    #[error("no machine code for this processor: {0}")]
    Processor(String),
    /// The code generator's words.
    #[error("the code generator refused {element}: {reason}")]
    Refused {
        /// Element.
        element: String,
        /// Its words.
        reason: String,
    },
}

/// The functions of one element.
#[derive(Clone, Copy, Debug)]
struct Functions {
    init: usize,
    handler: usize,
    signal: Option<usize>,
}

/// Memory that holds machine code; freed with the last user.
struct Code(Option<JITModule>);

impl Drop for Code {
    fn drop(&mut self) {
        if let Some(module) = self.0.take() {
            // SAFETY: every holder of a function's address also holds an `Arc` of this value, so no
            // function can be running or be called any more.
            unsafe { module.free_memory() };
        }
    }
}

// SAFETY: the module is only touched again when it is dropped; until then it is memory that
// processors execute and nothing writes.
unsafe impl Send for Code {}
// SAFETY: as above: there is no operation on a shared reference.
unsafe impl Sync for Code {}

/// The machine code of a graph.
pub struct Program {
    code: Arc<Code>,
    functions: Vec<Functions>,
    /// The whole graph's function.
    fused: Option<usize>,
}

impl std::fmt::Debug for Program {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Program").field("elements", &self.functions.len()).finish_non_exhaustive()
    }
}

impl Program {
    /// Compiles every node.
    ///
    /// Errors: this processor is unknown to the code generator, or it refuses an element.
    pub fn compile(graph: &Graph) -> Result<Self, NativeError> {
        let elements: Vec<&Element> = graph.nodes.iter().map(|node| &node.element).collect();
        Self::make(&elements, Some(graph))
    }

    /// Compiles elements, each for itself.
    ///
    /// Errors: as for [`Program::compile`].
    pub fn compile_elements(elements: &[&Element]) -> Result<Self, NativeError> {
        Self::make(elements, None)
    }

    fn make(elements: &[&Element], graph: Option<&Graph>) -> Result<Self, NativeError> {
        let processor = |reason: &dyn std::fmt::Display| NativeError::Processor(reason.to_string());
        let mut flags = settings::builder();
        for (name, value) in
            [("opt_level", "speed"), ("use_colocated_libcalls", "false"), ("is_pic", "false")]
        {
            flags.set(name, value).map_err(|error| processor(&error))?;
        }
        let target = cranelift_native::builder().map_err(|error| processor(&error))?;
        let target =
            target.finish(settings::Flags::new(flags)).map_err(|error| processor(&error))?;
        let builder = JITBuilder::with_isa(target, cranelift_module::default_libcall_names());
        let mut module = JITModule::new(builder);
        let mut ids = Vec::new();
        let mut handlers = Vec::new();
        for (at, element) in elements.iter().enumerate() {
            let refused = |error: code::Refused| NativeError::Refused {
                element: element.name.clone(),
                reason: error.0,
            };
            let name = |part: &str| format!("e{at}_{part}");
            let init =
                code::define(&mut module, &name("init"), element, &fold(element, &element.init));
            let init = init.map_err(refused)?;
            let folded = fold(element, &element.handler);
            let handler = code::define(&mut module, &name("handler"), element, &folded);
            let handler = handler.map_err(refused)?;
            handlers.push(folded);
            let signal = match &element.signal {
                Some(block) => {
                    let block = fold(element, block);
                    let signal = code::define(&mut module, &name("signal"), element, &block);
                    Some(signal.map_err(refused)?)
                }
                None => None,
            };
            ids.push((init, handler, signal));
        }
        let fused = match graph {
            Some(graph) => {
                fused::define(&mut module, graph, &handlers).map_err(|(node, refused)| {
                    NativeError::Refused {
                        element: elements.get(node).map_or("", |e| e.name.as_str()).to_owned(),
                        reason: refused.0,
                    }
                })?
            }
            None => None,
        };
        module.finalize_definitions().map_err(|error| processor(&error))?;
        let address = |id| module.get_finalized_function(id) as usize;
        let functions = ids
            .into_iter()
            .map(|(init, handler, signal)| Functions {
                init: address(init),
                handler: address(handler),
                signal: signal.map(address),
            })
            .collect();
        let fused = fused.map(address);
        Ok(Self { code: Arc::new(Code(Some(module))), functions, fused })
    }

    /// A machine for each node, for the reference's kernel loop.
    #[must_use]
    pub fn machines(&self) -> Vec<NativeMachine> {
        let each = |functions: &Functions| NativeMachine {
            _code: Arc::clone(&self.code),
            functions: *functions,
            fused: self.fused,
            mems: Vec::new(),
            control: Vec::new(),
        };
        self.functions.iter().map(each).collect()
    }
}

/// Runs one element's machine code.
pub struct NativeMachine {
    _code: Arc<Code>,
    functions: Functions,
    fused: Option<usize>,
    mems: Vec<usize>,
    /// The words that the whole graph's function shares with the host; the first machine's are used.
    control: Vec<u64>,
}

impl std::fmt::Debug for NativeMachine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NativeMachine").finish_non_exhaustive()
    }
}

/// Every compiled function: the frame's words, the addresses of its memories; 0, or 1 for endless.
type Function = unsafe extern "C" fn(*mut u64, *const usize) -> u64;
/// The whole graph's function: the control words; 0, or 1 for endless.
type Rounds = unsafe extern "C" fn(*mut u64) -> u64;

impl NativeMachine {
    fn call(
        &mut self,
        address: usize,
        element: &Element,
        frame: &mut Frame,
    ) -> Result<(), Endless> {
        let Frame { words, mems, .. } = frame;
        self.mems.clear();
        self.mems.extend(mems.iter_mut().map(|mem| mem.as_mut_ptr() as usize));
        // SAFETY: the address is that of a finalized function with this signature, made by
        // `code::define`; `_code` keeps its memory.
        let function = unsafe { std::mem::transmute::<usize, Function>(address) };
        // SAFETY: the function was compiled for this element's layout: it accesses the frame's words
        // and its memories' words only, which are borrowed mutably here for the whole call.
        let status = unsafe { function(words.as_mut_ptr(), self.mems.as_ptr()) };
        if status == 0 {
            Ok(())
        } else {
            Err(Endless { element: element.name.clone(), span: element.span })
        }
    }
}

/// True where no port of an element holds an item, and it asks for every input.
fn rests(element: &Element, frame: &Frame) -> bool {
    let mut flags = element.in_valid.iter().chain(&element.out_set);
    flags.all(|flag| frame.low(*flag) == 0)
        && frame.low(element.next_ports) == fused::all_inputs(element)
}

impl Machine for NativeMachine {
    fn init(&mut self, element: &Element, frame: &mut Frame) -> Result<(), Endless> {
        self.call(self.functions.init, element, frame)
    }

    fn handler(
        &mut self,
        element: &Element,
        frame: &mut Frame,
        _events: &mut Vec<Event>,
    ) -> Result<(), Endless> {
        self.call(self.functions.handler, element, frame)
    }

    fn signal(
        &mut self,
        element: &Element,
        frame: &mut Frame,
        _events: &mut Vec<Event>,
    ) -> Result<(), Endless> {
        match self.functions.signal {
            Some(address) => self.call(address, element, frame),
            None => {
                let words = frame.var(element, element.sig_in).to_vec();
                frame.var_mut(element, element.sig_out).copy_from_slice(&words);
                Ok(())
            }
        }
    }

    fn rounds(
        machines: &mut [Self],
        whole: &mut Whole<'_>,
        most: u64,
    ) -> Option<Result<(u64, Moved), Endless>> {
        let address = machines.first()?.fused?;
        let nodes = machines.len();
        let mut control = std::mem::take(&mut machines[0].control);
        control.clear();
        control.resize(fused::control_words(whole.graph()), 0);
        control[fused::MOST] = most.max(1);
        control[fused::LOGGED] = u64::from(whole.logged());
        for (node, machine) in machines.iter_mut().enumerate() {
            let rests = rests(&whole.graph().nodes[node].element, whole.frame(node));
            control[fused::busy_at(node)] = u64::from(!rests);
            let Frame { words, mems, .. } = whole.frame_mut(node);
            machine.mems.clear();
            machine.mems.extend(mems.iter_mut().map(|mem| mem.as_mut_ptr() as usize));
            let at = fused::node_at(node);
            control[at] = words.as_mut_ptr() as u64;
            control[at + 1] = machine.mems.as_ptr() as u64;
        }
        for channel in 0..whole.graph().channels.len() {
            let at = fused::channel_at(nodes, channel);
            let ring = whole.ring(channel);
            let place = |item: usize| (item * ring.width * 8) as u64;
            control[at] = ring.words.as_mut_ptr() as u64;
            control[at + 1] = place(ring.head);
            control[at + 2] = place((ring.head + ring.count) % ring.depth.max(1));
            control[at + 3] = ring.count as u64;
        }
        // SAFETY: the address is that of a finalized function with this signature, made by
        // `fused::define` for this graph; `_code` keeps its memory.
        let function = unsafe { std::mem::transmute::<usize, Rounds>(address) };
        // SAFETY: the control words point to the frames, memories and rings of the graph that the
        // function was compiled for, all borrowed mutably through `whole` and `machines` for the whole
        // call; it accesses those words and the control words only.
        let status = unsafe { function(control.as_mut_ptr()) };
        let item =
            |bytes: u64, width: usize| usize::try_from(bytes).unwrap_or(0) / (width * 8).max(1);
        for channel in 0..whole.graph().channels.len() {
            let at = fused::channel_at(nodes, channel);
            let width = whole.ring(channel).width;
            let head = item(control[at + 1], width);
            let count = usize::try_from(control[at + 3]).unwrap_or(0);
            whole.moved_on(channel, head, count, control[at + 4]);
        }
        for node in 0..nodes {
            let blocks = control[fused::blocks_at(node)];
            whole.iterated(node, control[fused::DONE].saturating_sub(blocks));
        }
        let outcome = if status == 0 {
            let moved = Moved {
                fetched: control[fused::FETCHED] != 0,
                wrote: control[fused::WROTE] != 0,
                blocked: control[fused::BLOCKED] != 0,
            };
            Ok((control[fused::DONE], moved))
        } else {
            let node = usize::try_from(control[fused::ENDLESS]).unwrap_or(0);
            let element = &whole.graph().nodes[node].element;
            Err(Endless { element: element.name.clone(), span: element.span })
        };
        machines[0].control = control;
        Some(outcome)
    }
}
