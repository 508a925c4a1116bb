//! Machine code for elements, by Cranelift.
//!
//! Place: `compiler`, a back end. Cranelift because it is a library, compiles an element in
//! milliseconds, has no C compiler behind it, and checks its own input; LLVM would give faster code
//! for far more build time.
//!
//! [`Program::compile`] turns each node of a graph into functions over a [`Frame`]: the same layout
//! that the interpreter uses. [`NativeMachine`] runs them under the reference's kernel loop.
//!
//! Invariants: a function reads and writes its frame's words, its memories' words and, in the
//! kernel, the rings it is lent; every access is inside them, because offsets are constants of the
//! layout and indices are compared with their arrays' sizes.

mod code;

use std::sync::Arc;

use beeline_ir::graph::Graph;
use beeline_ir::interpreter::{Endless, Event, Frame};
use beeline_ir::run::Machine;
use beeline_ir::tree::Element;
use cranelift_codegen::settings::{self, Configurable as _};
use cranelift_jit::{JITBuilder, JITModule};

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
        Self::compile_elements(&elements)
    }

    /// Compiles elements.
    ///
    /// Errors: as for [`Program::compile`].
    pub fn compile_elements(elements: &[&Element]) -> Result<Self, NativeError> {
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
        for (at, element) in elements.iter().enumerate() {
            let refused = |error: code::Refused| NativeError::Refused {
                element: element.name.clone(),
                reason: error.0,
            };
            let name = |part: &str| format!("e{at}_{part}");
            let init = code::define(&mut module, &name("init"), element, &element.init);
            let init = init.map_err(refused)?;
            let handler = code::define(&mut module, &name("handler"), element, &element.handler);
            let handler = handler.map_err(refused)?;
            let signal = match &element.signal {
                Some(block) => {
                    let signal = code::define(&mut module, &name("signal"), element, block);
                    Some(signal.map_err(refused)?)
                }
                None => None,
            };
            ids.push((init, handler, signal));
        }
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
        Ok(Self { code: Arc::new(Code(Some(module))), functions })
    }

    /// A machine for each node, for the reference's kernel loop.
    #[must_use]
    pub fn machines(&self) -> Vec<NativeMachine> {
        let each = |functions: &Functions| NativeMachine {
            _code: Arc::clone(&self.code),
            functions: *functions,
            mems: Vec::new(),
        };
        self.functions.iter().map(each).collect()
    }
}

/// Runs one element's machine code.
pub struct NativeMachine {
    _code: Arc<Code>,
    functions: Functions,
    mems: Vec<usize>,
}

impl std::fmt::Debug for NativeMachine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NativeMachine").finish_non_exhaustive()
    }
}

/// Every compiled function: the frame's words, the addresses of its memories; 0, or 1 for endless.
type Function = unsafe extern "C" fn(*mut u64, *const usize) -> u64;

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
}
