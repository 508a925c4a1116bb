// Addresses, ports and flags of IPv4 without options.
module L4_Parser (
    input clk,
    input rst,
    input [511:0] in0_data,
    input in0_valid,
    output in0_ready,
    output [511:0] out0_data,
    output out0_valid,
    input out0_ready,
    output [160:0] out1_data,
    output out1_valid,
    input out1_ready,
    input sig_valid,
    input [511:0] sig_data,
    output ans_valid,
    output [511:0] ans_data
);
    assign ans_valid = sig_valid;
    function [15:0] turned(input [15:0] half);
        turned = {half[7:0], half[15:8]};
    endfunction
    assign ans_data = sig_data;
    reg full, told, second;
    reg [511:0] held;
    reg [31:0] source, destination, stamp;
    reg [15:0] source_port, destination_port, length, high;
    reg [7:0] protocol;
    reg [5:0] flags;
    reg valid, fragment, opaque;
    wire ipv4 = turned(in0_data[111:96]) == 16'h0800;
    wire plain = ipv4 && in0_data[119:112] == 8'h45;
    wire first = in0_data[256], last = in0_data[257];
    wire tcp = protocol == 8'd6;
    wire short = last && in0_data[262:258] > 5'd26 && valid;
    assign in0_ready = (!full || out0_ready) && (!told || out1_ready);
    assign out0_valid = full;
    assign out0_data = held;
    assign out1_valid = told;
    assign out1_data = {opaque, stamp, length, flags, fragment, valid, protocol, destination_port,
        source_port, destination, source};
    always @(posedge clk)
        if (rst) begin
            full <= 1'b0;
            told <= 1'b0;
            second <= 1'b0;
        end else begin
            if (out0_ready) full <= 1'b0;
            if (out1_ready) told <= 1'b0;
            if (in0_valid && in0_ready) begin
                full <= 1'b1;
                held <= in0_data;
                if (first) begin
                    second <= 1'b1;
                    valid <= plain && !last;
                    opaque <= ipv4 && (last || !plain);
                    length <= turned(in0_data[143:128]);
                    fragment <= (turned(in0_data[175:160]) & 16'h1fff) != 16'd0;
                    protocol <= in0_data[191:184];
                    source <= {turned(in0_data[223:208]), turned(in0_data[239:224])};
                    stamp <= in0_data[489:458];
                    flags <= 6'd0;
                    high <= turned(in0_data[255:240]);
                    source_port <= 16'd0;
                    destination_port <= 16'd0;
                    destination <= 32'd0;
                    told <= last;
                end else if (second) begin
                    second <= 1'b0;
                    destination <= {high, turned(in0_data[15:0])};
                    if ((tcp || protocol == 8'd17) && !fragment) begin
                        source_port <= turned(in0_data[31:16]);
                        destination_port <= turned(in0_data[47:32]);
                    end
                    flags <= tcp ? in0_data[125:120] : 6'd0;
                    if (short) begin
                        valid <= 1'b0;
                        opaque <= 1'b1;
                    end
                    told <= 1'b1;
                end
            end
        end
endmodule
